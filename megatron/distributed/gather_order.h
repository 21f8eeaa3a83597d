// Which unit of sharded weights a pass needs next. Pure bookkeeping, without libtorch.
#pragma once

#include <map>
#include <optional>
#include <utility>

namespace megatron {

// Predicts the next unit from the last pass: the one that followed the same pair of consecutive
// units. Forward, backward, recomputation and pipeline schedules need no rules of their own.
class GatherOrder {
 public:
  void enter(int unit) {
    next_[{previous_, current_}] = unit;
    previous_ = std::exchange(current_, unit);
  }
  int current() const { return current_; }
  std::optional<int> predicted() const {
    const auto found = next_.find({previous_, current_});
    return found == next_.end() ? std::nullopt : std::optional<int>(found->second);
  }

 private:
  int previous_ = -1;
  int current_ = -1;
  std::map<std::pair<int, int>, int> next_;
};

}  // namespace megatron
