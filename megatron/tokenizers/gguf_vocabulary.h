// The tokenizer of a GGUF file, whose metadata hold the vocabulary and the name of the way in which
// text is cut, as the tokenizer.json that means the same.
//
// Sources: llama-vocab.cpp of llama.cpp, which defines the names; the tokenizers of the models that
// were trained with them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Values of the keys tokenizer.ggml.*; empty: absent.
struct GgufVocabulary {
  std::string name;   // of the file, for messages
  std::string model;  // "gpt2": byte-level BPE; "llama": pieces of SentencePiece with scores
  std::string pre;    // how text is cut before BPE: "llama-bpe", "qwen2", ...
  std::vector<std::string> tokens;
  std::vector<double> scores;
  std::vector<int64_t> types;  // 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<std::string> merges;
  std::optional<int64_t> bos, eos, unknown, padding;
  std::optional<bool> add_bos, add_eos, add_space_prefix;
  // Pieces merge in the order of their ids instead of their scores (Gemma).
  bool merges_by_id = false;
  // White space after control tokens is dropped (Phi-3).
  bool strips_after_control = false;
  // (name, template); the one without a name is "default".
  std::vector<std::pair<std::string, std::string>> chat_templates;
  // The beginning of a message about one of the keys.
  std::function<std::string(std::string_view key)> place;
};

// Throws Error that names the key for a vocabulary that is inconsistent, or of a kind that is not
// built.
TokenizerTexts gguf_tokenizer_texts(const GgufVocabulary& vocabulary);

}  // namespace megatron
