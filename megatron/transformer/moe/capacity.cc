#include "megatron/transformer/moe/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The first `count` rows of each column by descending score, as a mask [N, E]; equal scores: the
// lower row first.
at::Tensor first_of_columns(const at::Tensor& scores, int64_t count) {
  const at::Tensor rows = std::get<1>(at::sort(scores, /*stable=*/true, 0, /*descending=*/true));
  return at::zeros(scores.sizes(), scores.options().dtype(at::kBool))
      .scatter_(0, rows.narrow(0, 0, count), true);
}

}  // namespace

int64_t expert_capacity(int64_t rows, int64_t k, int64_t num_experts, double factor) {
  const double share = static_cast<double>(rows * k) / static_cast<double>(num_experts);
  return std::min(rows, static_cast<int64_t>(std::ceil(share * factor)));
}

at::Tensor within_capacity(const Routing& routing, int64_t num_experts,
                           const CapacityOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor index = routing.choices.to(at::kLong);
  const int64_t n = index.size(0);
  const int64_t capacity = expert_capacity(n, index.size(1), num_experts, options.factor);
  const double lowest = -std::numeric_limits<double>::infinity();
  const at::Tensor weights = options.policy == DropPolicy::kProbs ? routing.weights.detach()
                                                                  : at::zeros_like(routing.weights);
  // Those that did not choose an expert come after all that did.
  const at::Tensor scores =
      at::full({n, num_experts}, lowest, weights.options()).scatter_(1, index, weights);
  return first_of_columns(scores, capacity).gather(1, index);
}

at::Tensor padding_to_capacity(const Routing& routing, int64_t num_experts, int64_t capacity) {
  const at::NoGradGuard no_grad;
  const at::Tensor index = routing.choices.to(at::kLong);
  const at::Tensor none = at::zeros({index.size(0), num_experts}, routing.kept.options());
  const at::Tensor missing = capacity - none.scatter(1, index, routing.kept).sum(0);
  const at::Tensor others = none.scatter(1, index, true).logical_not_();
  return others.cumsum(0).le(missing).logical_and_(others);
}

}  // namespace megatron
