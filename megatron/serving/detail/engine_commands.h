// Commands of operators as JSON.
#pragma once

#include <string>
#include <string_view>

#include "megatron/scheduling/commands.h"
#include "megatron/serving/api_error.h"
#include "megatron/serving/http/http_server.h"

namespace megatron {

struct EngineCommandRequest {
  EngineCommand command;
  int64_t timeout_ns = 0;
};

// `name`: "pause", "resume", "suspend", "update_weights" or "drain"; an empty body is an empty
// object. Throws ApiError that names the member.
EngineCommandRequest parse_engine_command(std::string_view name, std::string_view body);

// 200; 409: refused; 504: not done in time; 500: failed.
HttpResponse command_response(const CommandOutcome& outcome);

// State and counters of the engine and of the server.
std::string status_json(const EngineStats& stats, size_t open_requests, const HttpCounts& http);

}  // namespace megatron
