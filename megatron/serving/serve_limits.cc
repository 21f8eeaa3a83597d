#include "megatron/serving/detail/flag_bounds.h"
#include "megatron/serving/serve_config.h"

namespace megatron {

void ServeLimits::fields(FieldVisitor& v) {
  v.group("limits of the server");
  v.field("max_header_bytes", max_header_bytes, "longest header of a request");
  v.field("max_header_fields", max_header_fields, "most fields of a header");
  v.field("max_body_bytes", max_body_bytes, "longest body of a request");
  v.field("max_json_depth", max_json_depth, "deepest nesting of a body");
  v.field("max_prompts", max_prompts, "most prompts in one request");
  v.field("max_choices", max_choices, "largest n");
  v.field("max_stop_texts", max_stop_texts, "most texts in stop");
  v.field("max_stop_text_bytes", max_stop_text_bytes, "longest text in stop");
  v.field("max_logit_bias", max_logit_bias, "most entries in logit_bias");
  v.field("max_media", max_media, "most images and sounds in one request");
  v.field("max_medium_bytes", max_medium_bytes,
          "largest file of an image or a sound; in base64 it is part of the body");
  v.field("max_image_pixels", max_image_pixels, "largest image, by its header");
  v.field("max_pending_requests", max_pending_requests,
          "requests that are read but not yet with the engine; more get 429");
  v.field("max_connections", max_connections, "connections at a time");
  v.field("max_connections_per_address", max_connections_per_address,
          "the same of one address, this machine's own not counted; 0: no limit, for instance "
          "behind a router");
  v.field("max_unread_bytes", max_unread_bytes,
          "output that may wait for a client that streams; a slower one is cut off");
  v.field("header_timeout_seconds", header_timeout_seconds, "time to send a header");
  v.field("body_timeout_seconds", body_timeout_seconds, "time to send a body");
  v.field("min_body_bytes_per_second", min_body_bytes_per_second,
          "least rate of a body after 5 seconds; 0: any");
  v.field("idle_timeout_seconds", idle_timeout_seconds,
          "how long a connection without a request stays open");
  v.field("send_timeout_seconds", send_timeout_seconds, "time to take 64 KiB of a response");
  v.field("request_timeout_seconds", request_timeout_seconds,
          "time from a request to its last token; a client may ask for less by the header "
          "X-Request-Timeout-Ms");
}

void ServeLimits::validate(Violations& violations) const {
  require_count(violations, "--max-header-bytes", max_header_bytes, 1024, 1 << 20);
  require_count(violations, "--max-header-fields", max_header_fields, 8, 10'000);
  require_count(violations, "--max-body-bytes", max_body_bytes, 1, int64_t{1} << 31);
  require_count(violations, "--max-json-depth", max_json_depth, 8, 1000);
  require_count(violations, "--max-prompts", max_prompts, 1, 1 << 20);
  require_count(violations, "--max-choices", max_choices, 1, 1024);
  require_count(violations, "--max-stop-texts", max_stop_texts, 0, 1024);
  require_count(violations, "--max-stop-text-bytes", max_stop_text_bytes, 1, 1 << 16);
  require_count(violations, "--max-logit-bias", max_logit_bias, 0, 1 << 20);
  require_count(violations, "--max-media", max_media, 0, 1 << 16);
  require_count(violations, "--max-medium-bytes", max_medium_bytes, 1, 64 << 20);
  require_count(violations, "--max-image-pixels", max_image_pixels, 1, 89'478'485);
  require_count(violations, "--max-pending-requests", max_pending_requests, 1, 1 << 20);
  require_count(violations, "--max-connections", max_connections, 1, 1 << 20);
  require_count(violations, "--max-connections-per-address", max_connections_per_address, 0,
                1 << 20);
  require_count(violations, "--max-unread-bytes", max_unread_bytes, 4096, int64_t{1} << 31);
  require_count(violations, "--min-body-bytes-per-second", min_body_bytes_per_second, 0, 1 << 30);
  require_seconds(violations, "--header-timeout-seconds", header_timeout_seconds);
  require_seconds(violations, "--body-timeout-seconds", body_timeout_seconds);
  require_seconds(violations, "--idle-timeout-seconds", idle_timeout_seconds);
  require_seconds(violations, "--send-timeout-seconds", send_timeout_seconds);
  require_seconds(violations, "--request-timeout-seconds", request_timeout_seconds);
}

}  // namespace megatron
