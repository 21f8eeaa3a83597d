// Flags of the server.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/serving/http/http_server.h"

namespace megatron {

struct ServeConfig : Config {
  std::string host = "127.0.0.1";
  int64_t port = 8000;
  std::string served_model_name;
  std::string api_key_file;
  bool no_auth = false;
  std::vector<std::string> allowed_hosts;
  std::string ssl_certfile, ssl_keyfile;
  int64_t http_threads = 1;
  int64_t request_threads = 2;
  int64_t default_max_tokens = 0;
  std::string tool_call_parser = "auto";
  double drain_timeout_seconds = 30.0;
  bool log_prompts = false;
  bool chat_page = true;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// What a client may send and wait for.
struct ServeLimits : Config {
  int64_t max_header_bytes = 16 << 10;
  int64_t max_header_fields = 100;
  int64_t max_body_bytes = 8 << 20;
  int64_t max_json_depth = 64;
  int64_t max_prompts = 1024;
  int64_t max_choices = 16;
  int64_t max_stop_texts = 64;
  int64_t max_stop_text_bytes = 256;
  int64_t max_logit_bias = 1024;
  int64_t max_media = 64;
  int64_t max_medium_bytes = 64 << 20;
  int64_t max_image_pixels = 64 << 20;
  int64_t max_pending_requests = 256;
  int64_t max_connections = 8192;
  int64_t max_connections_per_address = 64;
  int64_t max_unread_bytes = 1 << 20;
  double header_timeout_seconds = 10.0;
  double body_timeout_seconds = 60.0;
  int64_t min_body_bytes_per_second = 1024;
  double idle_timeout_seconds = 75.0;
  double send_timeout_seconds = 60.0;
  double request_timeout_seconds = 600.0;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// The settings of the HTTP layer that the flags mean.
HttpServerOptions http_options(const ServeConfig& config, const ServeLimits& limits);

}  // namespace megatron
