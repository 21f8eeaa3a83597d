// /tokenize, /detokenize and /tokenizer_info, as other servers and evaluation programs know them.
#pragma once

#include <string>
#include <string_view>

#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"

namespace megatron {

// {"prompt" or "messages", "add_special_tokens", "return_token_strs"} to {"count",
// "max_model_len", "tokens", "token_strs"}. Throws ApiError.
std::string tokenize_json(std::string_view body, const ServedModel& model,
                          const ServeLimits& limits);
// {"tokens"} to {"prompt"}. Throws ApiError.
std::string detokenize_json(std::string_view body, const ServedModel& model,
                            const ServeLimits& limits);
std::string tokenizer_info_json(const ServedModel& model);

}  // namespace megatron
