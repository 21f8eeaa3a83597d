// The tokenizers of the `tokenizers` package: added tokens, normalizer, pre-tokenizer, model,
// decoder.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "megatron/tokenizers/detail/bpe_model.h"
#include "megatron/tokenizers/detail/tokenizer_definition.h"
#include "megatron/tokenizers/detail/unigram_model.h"
#include "megatron/tokenizers/detail/wordpiece_model.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Each encoding thread keeps a word cache of 3 MiB for each of the last two tokenizers it used.
class PipelineTokenizer : public Tokenizer {
 public:
  // Throws Error for an inconsistent definition.
  PipelineTokenizer(std::string_view type, const TokenizerDefinition& definition);

  int64_t vocab_size() const override { return static_cast<int64_t>(bytes_.size()); }
  void encode_append(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const override;
  std::string token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override;
  std::optional<int32_t> eod() const override { return eod_; }
  std::optional<int32_t> bos() const override { return bos_; }
  std::optional<int32_t> pad() const override { return pad_; }
  std::optional<int32_t> cls() const override { return cls_; }
  std::optional<int32_t> sep() const override { return sep_; }
  std::optional<int32_t> mask() const override { return mask_; }
  std::string_view continuation_prefix() const override { return continuation_prefix_; }
  std::vector<int32_t> prefix_ids() const override { return before_; }
  std::vector<int32_t> suffix_ids() const override { return after_; }
  std::optional<int32_t> token_to_id(std::string_view token) const override;
  std::string id_to_token(int32_t id) const override;
  std::string fingerprint() const override { return fingerprint_; }
  std::vector<std::filesystem::path> files() const override { return files_; }

  // Where text spells no special token (rendered_text.h): the ids of a text with those that it
  // spells, and without `mark`; the text with `mark` in them.
  bool text_spells_no_special() const { return text_spells_no_special_; }
  std::vector<int32_t> encode_with_special(std::string_view text, std::string_view mark) const;
  std::string with_marks(std::string_view text, std::string_view mark) const;

 private:
  struct ThreadState;
  void build_model(const TokenizerDefinition& definition);
  void build_bpe(const TokenizerDefinition& definition, std::vector<std::string> tokens,
                 int32_t unknown);
  void build_unigram(const TokenizerDefinition& definition, std::vector<std::string> tokens,
                     int32_t unknown);
  std::array<int32_t, 256> byte_token_ids() const;
  void add_tokens(const TokenizerDefinition& definition);
  void find_special_ids(const TokenizerDefinition& definition);
  std::string make_fingerprint(std::string_view type, const TokenizerDefinition& definition) const;
  // Appends the ids of text without added tokens that match raw text; `first`: the text starts
  // here.
  void encode_segment(std::string_view text, bool first, ThreadState& state, WordEncoder& words,
                      std::vector<int32_t>& out) const;
  void encode_part(std::string_view part, bool first, std::string_view readable, ThreadState& state,
                   WordEncoder& words, std::vector<int32_t>& out) const;
  void check_id(int32_t id) const;

  const uint64_t instance_;  // tells the thread-local caches of several tokenizers apart
  std::unordered_map<std::string, int32_t> ids_;  // by spelling
  std::vector<std::string> tokens_;               // input of the decoder, by id
  std::vector<std::string> bytes_;                // each token decoded by itself
  std::vector<bool> special_;
  std::unique_ptr<WordModel> model_;         // null for Unigram
  std::unique_ptr<UnigramModel> unigram_;    // null for the others
  const MetaspaceCutter* cutter_ = nullptr;  // for BPE whose words may contain spaces
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Decoder decoder_;
  bool joins_bytes_ = false;  // decoding is joining bytes_
  bool text_spells_no_special_ = false;
  AddedTokenMatcher raw_matcher_, normalized_matcher_;
  std::optional<int32_t> eod_, bos_, pad_, cls_, sep_, mask_;
  std::string continuation_prefix_;
  std::vector<int32_t> before_, after_;
  std::string fingerprint_;
  std::vector<std::filesystem::path> files_;
};

}  // namespace megatron
