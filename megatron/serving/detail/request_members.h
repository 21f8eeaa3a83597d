// Members that the endpoints for text share.
#pragma once

#include "megatron/serving/detail/json_input.h"
#include "megatron/serving/generation_request.h"

namespace megatron {

// Sampling, stops, seed, streaming; "model" becomes the name for responses and the adapter.
void read_common_members(JsonObject& json, const ServedModel& model, const ServeLimits& limits,
                         GenerationRequest& request);

// Refuses members that are known and not supported, unless their value asks for nothing; notes
// those that are unknown. Asks the engine for the log-probabilities that are to be reported. Last,
// when all others have been asked for.
void finish_members(JsonObject& json, GenerationRequest& request);

// Ids of tokens, each within the vocabulary.
std::vector<int32_t> read_ids(JsonElement element, const std::string& member,
                              const ServedModel& model);

// The first of the request's members in `names` that is there; it throws if a second one is.
std::optional<int64_t> read_either(JsonObject& json, std::string_view first,
                                   std::string_view second, std::string& found);

// One text or a list of them, within the limits.
std::vector<std::string> read_stop(JsonObject& json, const ServeLimits& limits);

// A seed that no client gave; below 2^48, so that every reader of JSON can give it back.
uint64_t draw_seed();

}  // namespace megatron
