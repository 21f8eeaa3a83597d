#include "megatron/scheduling/step_budget.h"

#include <algorithm>

namespace megatron {
namespace {

// Features are scaled to about 1 in steps of usual size, durations to milliseconds.
std::array<double, 3> features(int64_t rows, int64_t context) {
  return {1.0, static_cast<double>(rows) / 1024, static_cast<double>(context) / (1 << 20)};
}
constexpr double kForget = 0.98;
constexpr double kStartVariance = 1e4;
constexpr int64_t kFewest = 8;  // steps before the fit is used

}  // namespace

StepBudget::StepBudget(int64_t max_tokens, int64_t goal_ns, int64_t min_chunk)
    : max_tokens_(max_tokens), goal_ns_(goal_ns), min_chunk_(min_chunk) {
  for (size_t i = 0; i < 3; ++i) covariance_[i][i] = kStartVariance;
}

void StepBudget::observe(int64_t rows, int64_t context, int64_t duration_ns) {
  const std::array<double, 3> x = features(rows, context);
  std::array<double, 3> gain{};
  double scale = kForget, error = static_cast<double>(duration_ns) / 1e6;
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 3; ++j) gain[i] += covariance_[i][j] * x[j];
    scale += x[i] * gain[i];
    error -= weights_[i] * x[i];
  }
  for (size_t i = 0; i < 3; ++i) weights_[i] += gain[i] / scale * error;
  // Steps that are all alike say nothing of some directions, whose variance must not grow for ever.
  const double trace = covariance_[0][0] + covariance_[1][1] + covariance_[2][2];
  const double forget = trace < 3 * kStartVariance ? kForget : 1.0;
  for (size_t i = 0; i < 3; ++i)
    for (size_t j = 0; j < 3; ++j)
      covariance_[i][j] = (covariance_[i][j] - gain[i] * gain[j] / scale) / forget;
  ++observed_;
}

double StepBudget::predicted_ns(int64_t rows, int64_t context) const {
  const std::array<double, 3> x = features(rows, context);
  double milliseconds = 0;
  for (size_t i = 0; i < 3; ++i) milliseconds += std::max(0.0, weights_[i]) * x[i];
  return milliseconds * 1e6;
}

int64_t StepBudget::chunk(int64_t rows, int64_t context, int64_t first, int64_t most,
                          int64_t least) const {
  most = std::min(most, max_tokens_ - rows);
  if (goal_ns_ == 0 || observed_ < kFewest || most <= least) return std::max<int64_t>(0, most);
  int64_t fits = least, above = most + 1;
  while (above - fits > 1) {
    const int64_t middle = fits + (above - fits) / 2;
    const bool within = predicted_ns(rows + middle, context + chunk_context(first, middle)) <=
                        static_cast<double>(goal_ns_);
    (within ? fits : above) = middle;
  }
  return fits;
}

}  // namespace megatron
