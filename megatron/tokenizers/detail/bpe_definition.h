// What files say about a byte-level BPE tokenizer, before anything is built from it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/tokenizers/detail/added_tokens.h"
#include "megatron/tokenizers/detail/pre_tokenizer.h"

namespace megatron {

struct BpeDefinition {
  // Tokens in GPT-2's printable spelling (byte_level.h).
  std::vector<std::pair<std::string, int32_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
  bool ignore_merges = false;
  bool fuse_unk = false;
  std::optional<std::string> unk_token;
  bool nfc = false;
  std::vector<PreTokenizerStep> steps;
  std::vector<AddedToken> added_tokens;
  std::optional<std::string> eos, bos, pad;                         // spellings
  std::string vocab_where, merges_where, steps_where, added_where;  // file and key, for messages
  std::vector<std::filesystem::path> files;
};

inline constexpr int64_t kMaxTokenId = (int64_t{1} << 24) - 1;

// Reads a tokenizer.json, and what a tokenizer_config.json beside it says about EOS, BOS and
// padding. Throws Error naming the file and the key for anything that is wrong or not supported.
BpeDefinition read_tokenizer_json(const std::filesystem::path& path);

// Reads GPT-2's vocab.json and merges.txt.
BpeDefinition read_gpt2_files(const std::filesystem::path& vocab,
                              const std::filesystem::path& merges);

}  // namespace megatron
