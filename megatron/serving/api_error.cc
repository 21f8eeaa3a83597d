#include "megatron/serving/api_error.h"

#include <algorithm>

#include "megatron/base/json_writer.h"

namespace megatron {
namespace {

// OpenAI's "type" for a status.
std::string_view error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 408:
    case 504:
      return "timeout_error";
    case 503:
      return "service_unavailable_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

}  // namespace

std::string error_json(const ApiError& error, ErrorShape shape) {
  JsonWriter json;
  json.begin_object();
  if (shape == ErrorShape::kMegatron) {
    json.member("message", error.what());
  } else {
    json.key("error").begin_object();
    json.member("message", error.what()).member("type", error_type(error.status));
    json.key("param");
    error.member.empty() ? json.null() : json.value(error.member);
    json.key("code");
    error.code.empty() ? json.null() : json.value(error.code);
    json.end_object();
  }
  return json.end_object().text();
}

HttpResponse error_response(const ApiError& error, ErrorShape shape) {
  HttpResponse response{.status = error.status, .body = error_json(error, shape)};
  if (error.retry_after_s > 0)
    response.headers.push_back({"Retry-After", std::to_string(error.retry_after_s)});
  return response;
}

ApiError api_error(const Refusal& refusal) {
  const int status = refusal.kind == Refusal::Kind::kInvalid     ? 400
                     : refusal.kind == Refusal::Kind::kQueueFull ? 429
                                                                 : 503;
  ApiError error(status, refusal.member, refusal.message,
                 status == 429   ? "queue_full"
                 : status == 503 ? "unavailable"
                                 : "");
  constexpr int64_t kSecond = 1'000'000'000;
  if (status != 400)
    error.retry_after_s = std::max<int64_t>(1, (refusal.retry_after_ns + kSecond - 1) / kSecond);
  return error;
}

ApiError api_error(const Finish& finish) {
  switch (finish.reason) {
    case FinishReason::kDeadline:
      return ApiError(504, "", "the request's time is over", "deadline");
    case FinishReason::kCancelled:
      return ApiError(503, "", "the request was cancelled by the server's operator", "cancelled");
    case FinishReason::kShutdown:
      return ApiError(503, "", "the server shuts down", "shutdown");
    default:
      break;
  }
  return ApiError(500, "", cat("the model failed: ", finish.message),
                  std::string(name(finish.reason)));
}

}  // namespace megatron
