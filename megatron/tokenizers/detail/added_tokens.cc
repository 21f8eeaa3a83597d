#include "megatron/tokenizers/detail/added_tokens.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

bool is_word(uint32_t c) { return (unicode_classes()[c] & 8) != 0; }

uint32_t last_code_point(std::string_view text) {
  size_t length;
  return decode_utf8(previous_utf8(text.data() + text.size()), length);
}

// The length of `text` without the white space at its end.
size_t trimmed_size(std::string_view text) {
  while (!text.empty() && is_space(last_code_point(text))) {
    text.remove_suffix(
        static_cast<size_t>(text.data() + text.size() - previous_utf8(text.data() + text.size())));
  }
  return text.size();
}

// The length of the white space at the start of `text`.
size_t leading_space(std::string_view text) {
  size_t at = 0, length;
  while (at < text.size() && is_space(decode_utf8(text.data() + at, length))) at += length;
  return at;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<AddedToken> tokens,
                                     const std::vector<std::string>& contents)
    : tokens_(std::move(tokens)) {
  MEGATRON_ASSERT(tokens_.size() == contents.size());
  for (size_t i = 0; i < tokens_.size(); ++i) insert(contents[i], static_cast<int32_t>(i));
}

void AddedTokenMatcher::insert(std::string_view content, int32_t token) {
  if (content.empty()) return;
  int32_t node = 0;
  for (const char c : content) {
    const auto byte = static_cast<unsigned char>(c);
    int32_t next = node == 0 ? (roots_[byte] == 0 ? -1 : roots_[byte]) : child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      Node added;
      added.byte = byte;
      if (node == 0) {
        roots_[byte] = next;
      } else {
        added.sibling = nodes_[node].first_child;
        nodes_[node].first_child = next;
      }
      nodes_.push_back(added);
    }
    node = next;
  }
  if (nodes_[node].token < 0) nodes_[node].token = token;
}

int32_t AddedTokenMatcher::child(int32_t node, unsigned char byte) const {
  int32_t next = nodes_[node].first_child;
  while (next >= 0 && nodes_[next].byte != byte) next = nodes_[next].sibling;
  return next;
}

bool AddedTokenMatcher::find(std::string_view sentence, size_t from, Match& match) const {
  const auto* text = reinterpret_cast<const unsigned char*>(sentence.data());
  for (size_t begin = from; begin < sentence.size(); ++begin) {
    int32_t node = roots_[text[begin]];
    if (node == 0) continue;
    match.token = -1;
    for (size_t at = begin + 1;; ++at) {
      if (nodes_[node].token >= 0) match = {begin, at, nodes_[node].token};
      if (at == sentence.size()) break;
      node = child(node, text[at]);
      if (node < 0) break;
    }
    if (match.token >= 0) return true;
  }
  return false;
}

bool AddedTokenMatcher::adjust(std::string_view sentence, size_t done, const Match& match,
                               size_t& begin, size_t& end) const {
  const AddedToken& token = tokens_[match.token];
  begin = match.begin;
  end = match.end;
  if (token.single_word) {
    size_t length;
    if (begin > 0 && is_word(last_code_point(sentence.substr(0, begin)))) return false;
    if (end < sentence.size() && is_word(decode_utf8(sentence.data() + end, length))) return false;
  }
  if (token.lstrip) begin = std::max(trimmed_size(sentence.substr(0, begin)), done);
  if (token.rstrip) end += leading_space(sentence.substr(end));
  return true;
}

}  // namespace megatron
