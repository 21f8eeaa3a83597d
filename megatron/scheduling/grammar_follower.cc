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

// The matcher has accepted a token.
void GrammarFollower::accepted() {
  ended_ = matcher_->has_ended();
  ends_forbidden_ = std::max<int64_t>(0, ends_forbidden_ - 1);
  if (!ended_) fill();
}

void GrammarFollower::advance(int32_t id) {
  guarded([&] {
    if (!failure_.empty()) return;
    if (matcher_->accept(id))
      accepted();
    else
      failure_ = cat("the token ", id, " does not continue the grammar");
  });
}

size_t GrammarFollower::look_ahead(std::span<const int32_t> ids, std::vector<uint32_t>& masks) {
  const std::vector<uint32_t> mask = mask_;
  const int64_t forbidden = ends_forbidden_;
  int64_t read = 0;
  size_t fit = 0;
  for (const int32_t id : ids) {
    if (mask_.empty() || !is_allowed(mask_, id)) break;
    guarded([&] {
      if (!matcher_->accept(id)) return;
      ++read;
      accepted();
    });
    if (ended_ || !failure_.empty() || read == static_cast<int64_t>(fit)) break;
    masks.insert(masks.end(), mask_.begin(), mask_.end());
    ++fit;
  }
  if (mask.empty() || (read == 0 && failure_.empty())) return 0;
  // What goes wrong behind a draft does so when that token is drawn.
  failure_.clear();
  ended_ = false;
  mask_ = mask;
  ends_forbidden_ = forbidden;
  guarded([&] { matcher_->roll_back(read); });
  return failure_.empty() ? fit : 0;
}

}  // namespace megatron
