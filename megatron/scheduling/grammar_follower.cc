#include "megatron/scheduling/grammar_follower.h"

#include <algorithm>
#include <exception>

namespace megatron {

GrammarFollower::GrammarFollower(const TokenGrammar& grammar, int64_t vocab_size,
                                 const std::vector<int32_t>& forbidden,
                                 const std::vector<int32_t>& ends, int64_t min_tokens)
    : forbidden_(forbidden), ends_(ends), ends_forbidden_(min_tokens) {
  mask_.resize(static_cast<size_t>(token_mask_words(vocab_size)));
  guarded([&] {
    matcher_ = grammar.start();
    fill();
  });
}

template <class Body>
void GrammarFollower::guarded(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    failure_ = error.what();
  }
  if (ended_ || !failure_.empty()) mask_.clear();
}

void GrammarFollower::fill() {
  matcher_->fill(mask_);
  const auto clear = [&](const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) mask_[static_cast<size_t>(id) / 32] &= ~(uint32_t{1} << (id % 32));
  };
  clear(forbidden_);
  if (ends_forbidden_ > 0) clear(ends_);
  if (std::ranges::all_of(mask_, [](uint32_t word) { return word == 0; }))
    failure_ = "no token that may be drawn continues the grammar";
}

void GrammarFollower::advance(int32_t id) {
  guarded([&] {
    if (!failure_.empty()) return;
    if (!matcher_->accept(id)) {
      failure_ = cat("the token ", id, " does not continue the grammar");
      return;
    }
    ended_ = matcher_->has_ended();
    ends_forbidden_ = std::max<int64_t>(0, ends_forbidden_ - 1);
    if (!ended_) fill();
  });
}

}  // namespace megatron
