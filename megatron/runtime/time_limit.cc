#include "megatron/runtime/time_limit.h"

#include <algorithm>
#include <utility>

namespace megatron {
namespace {

constexpr double kMargin = 1.25;  // for variation of times

}  // namespace

void TimeLimit::add_turn(double seconds) {
  if (std::exchange(warmed_up_, true)) longest_turn_ = std::max(longest_turn_, seconds);
}

bool TimeLimit::reached(double elapsed_seconds, double save_seconds) const {
  return elapsed_seconds + kMargin * (turns_to_stop_ * longest_turn_ + save_seconds) >= limit_;
}

}  // namespace megatron
