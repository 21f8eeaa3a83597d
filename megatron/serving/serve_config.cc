#include "megatron/serving/serve_config.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/serving/detail/flag_bounds.h"

namespace megatron {
namespace {

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

}  // namespace

void ServeConfig::fields(FieldVisitor& v) {
  v.group("server");
  v.field("host", host,
          "address to listen on; others than this machine's own need --api-key-file or --no-auth");
  v.field("port", port, "port to listen on; 0: any free one, which the first line says");
  v.field("served_model_name", served_model_name,
          "the model's name in requests and responses; default: the name of its folder");
  v.field("api_key_file", api_key_file,
          "a file with a line NAME:KEY for each client; NAME:KEY:admin may use /admin. Without a "
          "key no route answers");
  v.field("no_auth", no_auth, "serve other machines without keys");
  v.field("allowed_hosts", allowed_hosts,
          "further names by which clients may call this server (Host and Origin)");
  v.field("ssl_certfile", ssl_certfile, "PEM file with the chain of certificates: serves HTTPS");
  v.field("ssl_keyfile", ssl_keyfile, "PEM file with the private key of --ssl-certfile");
  v.field("http_threads", http_threads, "threads for sockets and streams");
  v.field("request_threads", request_threads,
          "threads that read requests: JSON, chat templates, tokens");
  v.field("default_max_tokens", default_max_tokens,
          "tokens of a chat's reply where the request does not say; 0: up to the context's end");
  v.field("tool_call_parser", tool_call_parser,
          "how the model writes tool calls: hermes, llama3_json, qwen3_coder, none, or auto: by "
          "its chat template");
  v.field("drain_timeout_seconds", drain_timeout_seconds,
          "after SIGTERM: time for requests in flight to end");
  v.field("log_prompts", log_prompts, "write the text of each prompt to the log");
  v.field({"chat_page", "--no-chat-page", /*negative=*/true}, chat_page,
          "do not serve the chat page at /");
}

void ServeConfig::validate(Violations& violations) const {
  require_count(violations, "--port", port, 0, 65535);
  require_count(violations, "--http-threads", http_threads, 1, 64);
  require_count(violations, "--request-threads", request_threads, 1, 256);
  require_count(violations, "--default-max-tokens", default_max_tokens, 0, INT32_MAX);
  require_seconds(violations, "--drain-timeout-seconds", drain_timeout_seconds);
  violations.require(ssl_certfile.empty() == ssl_keyfile.empty(),
                     "one of --ssl-certfile and --ssl-keyfile is given; expected both or neither");
  violations.require(!no_auth || api_key_file.empty(),
                     "--no-auth and --api-key-file are both given; expected one or neither");
  violations.require(tool_call_parser == "auto" || tool_call_parser == "hermes" ||
                         tool_call_parser == "llama3_json" || tool_call_parser == "qwen3_coder" ||
                         tool_call_parser == "none",
                     cat("--tool-call-parser ", tool_call_parser,
                         " is none of auto, hermes, llama3_json, qwen3_coder, none"));
}

HttpServerOptions http_options(const ServeConfig& config, const ServeLimits& limits) {
  HttpServerOptions options;
  options.host = config.host;
  options.port = static_cast<int>(config.port);
  options.threads = static_cast<int>(config.http_threads);
  options.certificate_file = config.ssl_certfile;
  options.key_file = config.ssl_keyfile;
  options.limits = {.parser = {.max_header_bytes = static_cast<uint64_t>(limits.max_header_bytes),
                               .max_header_fields = limits.max_header_fields,
                               .max_body_bytes = static_cast<uint64_t>(limits.max_body_bytes)},
                    .max_connections = limits.max_connections,
                    .max_connections_per_address = limits.max_connections_per_address,
                    .header_timeout_ns = nanoseconds(limits.header_timeout_seconds),
                    .body_timeout_ns = nanoseconds(limits.body_timeout_seconds),
                    .min_body_bytes_per_second = limits.min_body_bytes_per_second,
                    .idle_timeout_ns = nanoseconds(limits.idle_timeout_seconds),
                    .send_timeout_ns = nanoseconds(limits.send_timeout_seconds),
                    .max_unread_bytes = static_cast<uint64_t>(limits.max_unread_bytes)};
  return options;
}

}  // namespace megatron
