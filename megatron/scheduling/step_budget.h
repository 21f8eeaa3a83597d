// How many tokens a step may take, so that it stays below a goal for its duration.
#pragma once

#include <array>
#include <cstdint>

namespace megatron {

// A step takes a + b * rows + c * context ns, where context is the sum over rows of the positions
// that each sees. The three are fitted to measured steps by recursive least squares that forgets
// old ones.
class StepBudget {
 public:
  // `max_tokens`: of a step; `goal_ns`: 0: no goal. `min_chunk`: rows that a prompt gets whatever
  // the goal, so that it goes on.
  StepBudget(int64_t max_tokens, int64_t goal_ns, int64_t min_chunk = 16);

  // A measured step.
  void observe(int64_t rows, int64_t context, int64_t duration_ns);
  // Rows of a chunk that starts at position `first` and has at most `most`, next to `rows` and
  // `context` that the step has already.
  int64_t chunk(int64_t rows, int64_t context, int64_t first, int64_t most) const {
    return chunk(rows, context, first, most, min_chunk_);
  }
  // The same with another least number of rows whatever the goal.
  int64_t chunk(int64_t rows, int64_t context, int64_t first, int64_t most, int64_t least) const;
  int64_t max_tokens() const { return max_tokens_; }
  double predicted_ns(int64_t rows, int64_t context) const;

 private:
  int64_t max_tokens_, goal_ns_, min_chunk_;
  int64_t observed_ = 0;
  std::array<double, 3> weights_{};                    // of the scaled features
  std::array<std::array<double, 3>, 3> covariance_{};  // inverse of their sums of products
};

// The context of a chunk: each row sees all positions up to its own.
constexpr int64_t chunk_context(int64_t first, int64_t count) {
  return count * first + count * (count + 1) / 2;
}

}  // namespace megatron
