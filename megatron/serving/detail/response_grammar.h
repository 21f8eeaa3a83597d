// The grammar that a reply must follow, by what a request says: "response_format" (OpenAI),
// "structured_outputs" (vLLM), "tool_choice".
#pragma once

#include <string>

#include "megatron/serving/detail/json_input.h"
#include "megatron/serving/generation_request.h"

namespace megatron {

// Reads the first two members and compiles what they ask for, which takes time. Throws ApiError.
void read_response_grammar(JsonObject& json, const ServedModel& model, GenerationRequest& request);

// A call of one of `tools`, or with parallel calls several; `name`: of the one to be called; empty:
// any. Sets the grammar. Throws ApiError.
void require_tool_calls(simdjson::dom::array tools, const std::string& name,
                        const ServedModel& model, GenerationRequest& request);

}  // namespace megatron
