// Tokenizers of SentencePiece .model files: ids and text equal those of the `sentencepiece`
// package.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "megatron/tokenizers/detail/bpe_model.h"
#include "megatron/tokenizers/detail/sentencepiece_file.h"
#include "megatron/tokenizers/detail/text/charsmap.h"
#include "megatron/tokenizers/detail/text/double_array.h"
#include "megatron/tokenizers/detail/unigram_model.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Control symbols are never matched in text and are omitted from decoded text, as in the package.
// Each encoding thread keeps a word cache of 3 MiB for each of the last two tokenizers it used.
class SentencePieceTokenizer : public Tokenizer {
 public:
  // Throws Error if the file cannot be used.
  SentencePieceTokenizer(std::string_view type, const std::filesystem::path& path);

  int64_t vocab_size() const override { return static_cast<int64_t>(file_.pieces.size()); }
  void encode_append(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const override;
  std::string token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override;
  std::optional<int32_t> eod() const override { return control(file_.eos_piece); }
  std::optional<int32_t> bos() const override { return control(file_.bos_piece); }
  std::optional<int32_t> pad() const override { return control(file_.pad_piece); }
  std::optional<int32_t> token_to_id(std::string_view token) const override;
  std::string id_to_token(int32_t id) const override { return piece(id).text; }
  std::string fingerprint() const override { return fingerprint_; }
  std::vector<std::filesystem::path> files() const override { return {path_}; }

 private:
  using Piece = SentencePieceFile::Piece;
  using PieceType = SentencePieceFile::PieceType;
  struct ThreadState;

  void build_unigram();
  void build_bpe();
  std::string make_fingerprint(std::string_view type) const;
  std::optional<int32_t> control(const std::string& piece) const;
  // The normalisation of the start of `text`; sets the length of the normalised part.
  std::string_view normalize_prefix(std::string_view text, size_t& length) const;
  void normalize(std::string_view text, std::string& out) const;
  const Piece& piece(int32_t id) const;

  const uint64_t instance_;
  std::filesystem::path path_;
  SentencePieceFile file_;
  std::unordered_map<std::string_view, int32_t> ids_;
  std::string_view space_;  // replacement of a space
  Charsmap charsmap_;
  DoubleArray user_defined_;
  // ASCII characters that are unchanged if followed by another one
  std::array<bool, 128> copied_{};
  std::unique_ptr<BpeModel> bpe_;
  std::unique_ptr<UnigramModel> unigram_;
  std::string fingerprint_;
};

}  // namespace megatron
