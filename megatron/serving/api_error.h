// A request that is refused: a status, the member that is at fault, a message for the client.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/scheduling/request.h"
#include "megatron/serving/http/http_message.h"

namespace megatron {

class ApiError : public Error {
 public:
  // `member`: of the request, as it is spelled there ("stream_options.include_usage"); empty: none.
  ApiError(int status, std::string member, const std::string& message, std::string code = {})
      : Error(message), status(status), member(std::move(member)), code(std::move(code)) {}

  int status;
  std::string member;
  std::string code;           // OpenAI's "code"; empty: null
  int64_t retry_after_s = 0;  // 0: no Retry-After header
};

// The shape of errors on a route.
enum class ErrorShape {
  kOpenAi,    // {"error": {"message", "type", "param", "code"}}
  kMegatron,  // {"message"}, which Megatron-LM's clients read
};

// The object as one line of JSON.
std::string error_json(const ApiError& error, ErrorShape shape);

HttpResponse error_response(const ApiError& error, ErrorShape shape);

// What a refusal of the engine is for a client.
ApiError api_error(const Refusal& refusal);
// What a text that ended with an error (is_error(), kCancelled, kDeadline, kShutdown) is.
ApiError api_error(const Finish& finish);

}  // namespace megatron
