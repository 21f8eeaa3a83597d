// A grammar without texts, for schedules: which ids come next depends on those before.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/scheduling/token_grammar.h"

namespace megatron {

constexpr int32_t kToyEnd = 249;

// `length` ids below kToyEnd, each congruent to the sum of those before modulo 3, then kToyEnd.
class ToyGrammar final : public TokenGrammar {
 public:
  explicit ToyGrammar(size_t length, size_t dead_after = SIZE_MAX, size_t throws_after = SIZE_MAX)
      : rule_{length, dead_after, throws_after} {}
  std::unique_ptr<TokenMatcher> start() const override { return std::make_unique<Matcher>(rule_); }

 private:
  struct Rule {
    size_t length, dead_after, throws_after;
  };
  class Matcher final : public TokenMatcher {
   public:
    explicit Matcher(const Rule& rule) : rule_(rule) {}
    void fill(std::span<uint32_t> mask) override {
      MEGATRON_CHECK(ids_.size() < rule_.throws_after, "the matcher is broken");
      std::ranges::fill(mask, 0u);
      for (int32_t id = 0; id <= kToyEnd; ++id)
        if (fits(id)) mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
    }
    bool accept(int32_t id) override {
      if (!fits(id)) return false;
      ids_.push_back(id);
      return true;
    }
    void roll_back(int64_t count) override {
      ids_.resize(ids_.size() - static_cast<size_t>(count));
    }
    bool has_ended() const override { return ids_.size() > rule_.length; }

   private:
    bool fits(int32_t id) const {
      if (has_ended() || ids_.size() >= rule_.dead_after) return false;
      if (ids_.size() == rule_.length) return id == kToyEnd;
      int32_t sum = 0;
      for (const int32_t before : ids_) sum += before;
      return id < kToyEnd && id % 3 == sum % 3;
    }
    Rule rule_;
    std::vector<int32_t> ids_;
  };
  Rule rule_;
};

}  // namespace megatron
