#include "megatron/tokenizers/detail/simple_tokenizers.h"

#include <algorithm>
#include <charconv>

#include "megatron/base/check.h"

namespace megatron {

void ByteLevelTokenizer::encode_append(std::string_view text, std::vector<int32_t>& out) const {
  const size_t before = out.size();
  out.resize(before + text.size());
  for (size_t i = 0; i < text.size(); ++i) out[before + i] = static_cast<unsigned char>(text[i]);
}

std::string ByteLevelTokenizer::token_bytes(int32_t id) const {
  MEGATRON_CHECK(id >= 0 && id <= 256, "token id ", id, " is outside the vocabulary of 257");
  return id == 256 ? "<|endoftext|>" : std::string(1, static_cast<char>(id));
}

std::optional<int32_t> ByteLevelTokenizer::token_to_id(std::string_view token) const {
  if (token == "<|endoftext|>") return 256;
  if (token.size() == 1) return static_cast<unsigned char>(token[0]);
  return std::nullopt;
}

NullTokenizer::NullTokenizer(int64_t vocab_size, std::optional<int64_t> eod, int64_t pad)
    : vocab_size_(vocab_size), eod_(static_cast<int32_t>(eod.value_or(vocab_size - 1))) {
  if (pad >= 0) pad_ = static_cast<int32_t>(pad);
}

std::optional<int32_t> NullTokenizer::parse(std::string_view word) const {
  int64_t id = -1;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, id);
  if (error != std::errc() || stop != end || id < 0 || id >= vocab_size_) return std::nullopt;
  return static_cast<int32_t>(id);
}

void NullTokenizer::encode_append(std::string_view text, std::vector<int32_t>& out) const {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  for (size_t at = text.find_first_not_of(kSpace); at != text.npos;) {
    const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    const std::optional<int32_t> id = parse(word);
    MEGATRON_CHECK(id.has_value(), "the null tokenizer read \"", word.substr(0, 40),
                   "\", expected decimal ids from 0 to ", vocab_size_ - 1,
                   " separated by white space");
    out.push_back(*id);
    at = text.find_first_not_of(kSpace, end);
  }
}

std::string NullTokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string text;
  for (const int32_t id : ids) {
    if (!(skip_special_tokens && is_special(id))) text += token_bytes(id);
  }
  if (!text.empty()) text.pop_back();
  return text;
}

std::string NullTokenizer::id_to_token(int32_t id) const {
  MEGATRON_CHECK(id >= 0 && id < vocab_size_, "token id ", id, " is outside the vocabulary of ",
                 vocab_size_);
  return std::to_string(id);
}

std::string NullTokenizer::token_bytes(int32_t id) const { return id_to_token(id) + " "; }

std::optional<int32_t> NullTokenizer::token_to_id(std::string_view token) const {
  return parse(token);
}

std::string NullTokenizer::fingerprint() const {
  return cat("NullTokenizer-", vocab_size_, "-", eod_, "-", pad_ ? *pad_ : -1);
}

}  // namespace megatron
