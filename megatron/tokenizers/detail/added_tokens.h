// Finds added and special tokens in text, with the rules of the `tokenizers` package.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  // only without adjacent word characters
  bool lstrip = false;       // includes the white space on its left
  bool rstrip = false;       // includes the white space on its right
  bool normalized = false;   // searched in the normalised text
  bool special = false;      // omitted by decode(skip_special_tokens)
};

// The longest of the leftmost matches wins; matches do not overlap. Thread safe.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  // `contents[i]` is the spelling of tokens[i] in the text that is searched.
  AddedTokenMatcher(std::vector<AddedToken> tokens, const std::vector<std::string>& contents);

  bool empty() const { return tokens_.empty(); }

  // Where the first token begins, without the rules for what is beside it; npos: there is none.
  size_t first_start(std::string_view sentence) const {
    Match match;
    return find(sentence, 0, match) ? match.begin : sentence.npos;
  }

  // Calls text(piece) and token(id) in order for the parts of well-formed `sentence`. Pieces of
  // text are never empty.
  template <class OnText, class OnToken>
  void split(std::string_view sentence, OnText&& text, OnToken&& token) const {
    size_t done = 0, from = 0;
    Match match;
    while (find(sentence, from, match)) {
      from = match.end;
      size_t begin, end;
      if (!adjust(sentence, done, match, begin, end)) continue;
      if (done < begin) text(sentence.substr(done, begin - done));
      token(tokens_[match.token].id);
      done = end;
    }
    if (done < sentence.size()) text(sentence.substr(done));
  }

 private:
  struct Match {
    size_t begin, end;
    int32_t token;
  };
  struct Node {
    int32_t first_child = -1;
    int32_t sibling = -1;
    int32_t token = -1;
    unsigned char byte = 0;
  };

  void insert(std::string_view content, int32_t token);
  int32_t child(int32_t node, unsigned char byte) const;
  // The leftmost, longest match at or after `from`.
  bool find(std::string_view sentence, size_t from, Match& match) const;
  // Applies single_word, lstrip and rstrip; false if the match is rejected.
  bool adjust(std::string_view sentence, size_t done, const Match& match, size_t& begin,
              size_t& end) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<int32_t, 256> roots_{};  // child of the root by byte; 0: none
};

}  // namespace megatron
