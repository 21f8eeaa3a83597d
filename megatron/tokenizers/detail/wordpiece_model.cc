#include "megatron/tokenizers/detail/wordpiece_model.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

WordPieceModel::WordPieceModel(const std::vector<std::string>& tokens, std::string_view prefix,
                               int32_t unknown, size_t max_characters)
    : unknown_(unknown), max_characters_(max_characters) {
  std::vector<std::pair<std::string_view, int32_t>> first, following;
  for (size_t id = 0; id < tokens.size(); ++id) {
    std::string_view token = tokens[id];
    first.emplace_back(token, static_cast<int32_t>(id));
    if (!token.starts_with(prefix)) continue;
    token.remove_prefix(prefix.size());
    following.emplace_back(token, static_cast<int32_t>(id));
  }
  first_ = DoubleArray(std::move(first));
  following_ = DoubleArray(std::move(following));
}

void WordPieceModel::encode_word(std::string_view word, ModelScratch&,
                                 std::vector<int32_t>& out) const {
  const auto characters = std::count_if(word.begin(), word.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  });
  const size_t before = out.size();
  if (static_cast<size_t>(characters) > max_characters_) {
    out.push_back(unknown_);
    return;
  }
  const DoubleArray* trie = &first_;
  while (!word.empty()) {
    size_t length;
    const int32_t id = trie->find_longest(word, length);
    if (id < 0) {
      out.resize(before);
      out.push_back(unknown_);
      return;
    }
    out.push_back(id);
    word.remove_prefix(length);
    trie = &following_;
  }
}

WordLevelModel::WordLevelModel(const std::vector<std::string>& tokens, int32_t unknown)
    : tokens_(tokens), unknown_(unknown) {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!tokens_[id].empty()) ids_.emplace(tokens_[id], static_cast<int32_t>(id));
  }
}

void WordLevelModel::encode_word(std::string_view word, ModelScratch&,
                                 std::vector<int32_t>& out) const {
  const auto found = ids_.find(word);
  MEGATRON_CHECK(found != ids_.end() || unknown_ >= 0, "the word \"", word.substr(0, 40),
                 "\" is not in the tokenizer's vocabulary, which has no unk_token");
  out.push_back(found != ids_.end() ? found->second : unknown_);
}

}  // namespace megatron
