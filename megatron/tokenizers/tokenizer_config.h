// tokenizer_config.json, from which transformers reads the class of a tokenizer and its special
// tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// The text of the file for the tokenizer in `folder`: class, tokens that begin and end a document,
// padding token, and the longest input of the model if known; other members of `base` (the text of
// such a file, or empty) are kept. Empty: `folder` contains neither a tokenizer.json nor GPT-2's
// vocab.json and merges.txt, the only ones whose classes are certain. Throws Error if the tokenizer
// or `base` cannot be read.
std::string tokenizer_config_json(const std::filesystem::path& folder,
                                  std::optional<int64_t> model_max_length,
                                  const std::string& base = "");

}  // namespace megatron
