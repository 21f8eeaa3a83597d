// The settings beside a model of Hugging Face with which sentence-transformers makes vectors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace megatron {

struct SentenceTransformer {
  bool mean = true;  // of all tokens; false: the vector of the first one
  bool normalize = false;
  std::optional<int64_t> max_length;  // tokens of a text
};

// From modules.json, the folder of pooling that it names, sentence_bert_config.json and
// tokenizer_config.json; nothing where there is no modules.json. Throws Error naming what is not
// built: other modules, other pooling, text that is made lower case outside of the tokenizer.
std::optional<SentenceTransformer> read_sentence_transformer(const std::filesystem::path& folder);

}  // namespace megatron
