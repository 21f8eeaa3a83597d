// The grammar of one text under way: which ids may be drawn next.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "megatron/scheduling/token_grammar.h"

namespace megatron {

// No exception leaves it: what goes wrong is its failure().
class GrammarFollower {
 public:
  // `forbidden`: ids that are never drawn. `ends`: ids that are not drawn before `min_tokens`.
  GrammarFollower(const TokenGrammar& grammar, int64_t vocab_size,
                  const std::vector<int32_t>& forbidden, const std::vector<int32_t>& ends,
                  int64_t min_tokens);

  // A token was drawn.
  void advance(int32_t id);

  // Appends the masks after `ids`, a mask each, as if these were drawn one after another; their
  // number: less than those of `ids` if one does not fit, or ends the grammar. Nothing changes.
  size_t look_ahead(std::span<const int32_t> ids, std::vector<uint32_t>& masks);

  // Of the next token; see TokenMatcher. Nothing after the end or a failure.
  std::span<const uint32_t> mask() const { return mask_; }
  // The grammar's own end was drawn.
  bool has_ended() const { return ended_; }
  // Why the text cannot go on; empty: it can, or has ended.
  const std::string& failure() const { return failure_; }

 private:
  void fill();
  void accepted();
  template <class Body>
  void guarded(const Body& body);

  std::unique_ptr<TokenMatcher> matcher_;
  std::vector<int32_t> forbidden_, ends_;
  int64_t ends_forbidden_;  // for so many more tokens
  std::vector<uint32_t> mask_;
  bool ended_ = false;
  std::string failure_;
};

}  // namespace megatron
