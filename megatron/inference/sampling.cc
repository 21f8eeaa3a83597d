#include "megatron/inference/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

double uniform_draw(int64_t seed, int64_t row, int64_t position) {
  at::Tensor draw = at::empty({1}, at::kDouble);
  uniform_(draw, 0.0, 1.0, random_key(seed, "sampling", row), position, 1, 0);
  return draw.item<double>();
}

}  // namespace

void SamplingConfig::fields(FieldVisitor& v) {
  v.group("sampling");
  v.field("greedy", greedy, "always take the most likely token");
  v.field("temperature", temperature, "divides the logits; below 1 sharper, above 1 flatter");
  v.field({"top_k", "--top-k --top_k"}, top_k, "sample among the k most likely tokens; 0: all");
  v.field({"top_p", "--top-p --top_p"}, top_p,
          "sample among the fewest tokens whose probabilities reach p; 0: all");
  v.field({"seed", "--seed --random-seed"}, seed, "seed of the draws");
}

void SamplingConfig::validate(Violations& violations) const {
  if (!(temperature > 0.0 && temperature <= 100.0))
    violations.add(cat("--temperature ", temperature, " is outside (0, 100]"),
                   "use --greedy for the most likely token");
  if (top_k < 0) violations.add(cat("--top-k ", top_k, " is negative"), "0 means all tokens");
  if (!(top_p >= 0.0 && top_p <= 1.0)) violations.add(cat("--top-p ", top_p, " is outside [0, 1]"));
  if (seed <= 0) violations.add(cat("--seed ", seed, " must be positive"));
}

int64_t sample_token(const at::Tensor& logits, int64_t vocab_size, const SamplingConfig& config,
                     int64_t row, int64_t position) {
  const at::Tensor valid = logits.narrow(0, 0, vocab_size).to(at::kDouble).contiguous();
  const double* x = valid.const_data_ptr<double>();
  const int64_t best = std::max_element(x, x + vocab_size) - x;
  const bool any_nan =
      std::any_of(x, x + vocab_size, [](double value) { return std::isnan(value); });
  MEGATRON_CHECK(!any_nan && std::isfinite(x[best]),
                 "the model's logits are not finite at position ", position,
                 "\nhint: the checkpoint may come from a run that diverged");
  if (config.greedy || config.top_k == 1) return best;

  // Tokens by descending logit; ties by id, so that the order is unique.
  std::vector<int64_t> order(static_cast<size_t>(vocab_size));
  std::iota(order.begin(), order.end(), 0);
  const auto falling = [&](int64_t a, int64_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  size_t kept = order.size();
  if (config.top_k > 0) kept = std::min(kept, static_cast<size_t>(config.top_k));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept), order.end(),
                    falling);

  std::vector<double> cumulative(kept);
  double total = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    total += std::exp((x[order[i]] - x[best]) / config.temperature);
    cumulative[i] = total;
  }
  if (config.top_p > 0.0) {
    const auto enough =
        std::lower_bound(cumulative.begin(), cumulative.end(), config.top_p * total);
    kept = std::min(kept, static_cast<size_t>(enough - cumulative.begin()) + 1);
    total = cumulative[kept - 1];
  }
  const double draw = uniform_draw(config.seed, row, position) * total;
  const auto end = cumulative.begin() + static_cast<std::ptrdiff_t>(kept);
  const auto chosen = std::upper_bound(cumulative.begin(), end, draw);
  return order[static_cast<size_t>(std::min(chosen, end - 1) - cumulative.begin())];
}

}  // namespace megatron
