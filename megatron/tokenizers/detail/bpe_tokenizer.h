// Byte-level BPE: added tokens, normalisation, pre-tokenizer, merges, and the way back.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "megatron/tokenizers/detail/bpe_definition.h"
#include "megatron/tokenizers/detail/bpe_model.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Each thread that encodes keeps a word cache of 3 MiB for each of the last two tokenizers it used.
class BpeTokenizer : public Tokenizer {
 public:
  // Throws Error for a definition that does not hold together.
  BpeTokenizer(std::string_view type, const BpeDefinition& definition);

  int64_t vocab_size() const override { return static_cast<int64_t>(bytes_.size()); }
  void encode_append(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const override;
  std::string token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override;
  std::optional<int32_t> eod() const override { return eod_; }
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> pad() const override { return pad_; }
  std::optional<int32_t> token_to_id(std::string_view token) const override;
  std::string fingerprint() const override { return fingerprint_; }
  std::vector<std::filesystem::path> files() const override { return files_; }

 private:
  struct ThreadState;
  ThreadState& thread_state() const;
  void add_tokens(const BpeDefinition& definition);
  void find_special_ids(const BpeDefinition& definition);
  std::string make_fingerprint(std::string_view type, const BpeDefinition& definition) const;
  void encode_segment(std::string_view text, ThreadState& state, WordEncoder& words,
                      std::vector<int32_t>& out) const;
  void check_id(int32_t id) const;

  const uint64_t instance_;  // tells the thread-local caches of several tokenizers apart
  std::unordered_map<std::string, int32_t> ids_;  // by spelling
  std::vector<std::string> bytes_;                // what decode() gives, by id
  std::vector<bool> special_;
  std::unique_ptr<BpeModel> model_;
  PreTokenizer pre_tokenizer_;
  bool nfc_;
  AddedTokenMatcher raw_matcher_, normalized_matcher_;
  std::optional<int32_t> eod_, bos_, pad_;
  std::string fingerprint_;
  std::vector<std::filesystem::path> files_;
};

}  // namespace megatron
