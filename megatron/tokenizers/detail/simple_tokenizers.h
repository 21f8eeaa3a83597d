// Tokenizers without a vocabulary file.
#pragma once

#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Ids 0 to 255 are the raw bytes, including ill-formed UTF-8; 256 is <|endoftext|>, which never
// results from text.
class ByteLevelTokenizer : public Tokenizer {
 public:
  int64_t vocab_size() const override { return 257; }
  void encode_append(std::string_view text, std::vector<int32_t>& out) const override;
  std::string token_bytes(int32_t id) const override;
  bool is_special(int32_t id) const override { return id == 256; }
  std::optional<int32_t> eod() const override { return 256; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> pad() const override { return std::nullopt; }
  std::optional<int32_t> token_to_id(std::string_view token) const override;
  std::string id_to_token(int32_t id) const override { return token_bytes(id); }
  std::string fingerprint() const override { return "ByteLevelTokenizer-1"; }
};

// Text is decimal ids separated by white space, as Megatron's NullTokenizer reads and writes it.
class NullTokenizer : public Tokenizer {
 public:
  // `eod`: the last id by default; `pad` -1: none.
  NullTokenizer(int64_t vocab_size, std::optional<int64_t> eod, int64_t pad);
  int64_t vocab_size() const override { return vocab_size_; }
  void encode_append(std::string_view text, std::vector<int32_t>& out) const override;
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const override;
  std::string token_bytes(int32_t id) const override;  // the id followed by a space
  bool is_special(int32_t id) const override { return id == eod_ || (pad_ && id == *pad_); }
  std::optional<int32_t> eod() const override { return eod_; }
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> pad() const override { return pad_; }
  std::optional<int32_t> token_to_id(std::string_view token) const override;
  std::string id_to_token(int32_t id) const override;
  std::string fingerprint() const override;

 private:
  // The id that `word` spells; nullopt unless it is a number below the vocabulary's size.
  std::optional<int32_t> parse(std::string_view word) const;

  int64_t vocab_size_;
  int32_t eod_;
  std::optional<int32_t> pad_;
};

}  // namespace megatron
