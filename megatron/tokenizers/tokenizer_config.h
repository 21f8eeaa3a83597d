// tokenizer_config.json, by which transformers knows the class of a tokenizer and its special
// tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// The text of the file for the tokenizer in `folder`: class, tokens that begin and end a document
// and that pad, and the longest input of the model when it is known; other members of `base` (the
// text of such a file, or empty) stay. Empty: `folder` holds neither a tokenizer.json nor GPT-2's
// vocab.json and merges.txt, whose classes are the only ones that are known to fit. Throws Error
// when the tokenizer or `base` cannot be read.
std::string tokenizer_config_json(const std::filesystem::path& folder,
                                  std::optional<int64_t> model_max_length,
                                  const std::string& base = "");

}  // namespace megatron
