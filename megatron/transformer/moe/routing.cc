#include "megatron/transformer/moe/routing.h"

#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/router_function.h"

namespace megatron {
namespace {

// The factors of the columns after one iteration, {d1, d0}.
std::pair<at::Tensor, at::Tensor> sinkhorn_iteration(const at::Tensor& cost, const at::Tensor& d1) {
  constexpr double kEpsilon = 1e-8;
  const auto rows = static_cast<double>(cost.size(0)), columns = static_cast<double>(cost.size(1));
  const at::Tensor d0 = ((d1 * cost).sum(1) + kEpsilon).mul_(rows).reciprocal_();
  return {((d0.unsqueeze(1) * cost).sum(0) + kEpsilon).mul_(columns).reciprocal_(), d0};
}

}  // namespace

at::Tensor top_experts(const at::Tensor& scores, int64_t k) {
  return router_choices(scores, {}, {.topk = k});
}

at::Tensor choose_experts(const at::Tensor& logits, const at::Tensor& bias,
                          const RoutingOptions& options) {
  return router_choices(logits, bias, options);
}

at::Tensor routing_weights(const at::Tensor& logits, const at::Tensor& choices,
                           const RoutingOptions& options) {
  return router_outputs(logits, options, router_pass(logits, {}, options, choices)).weights;
}

Routing route(const at::Tensor& logits, const at::Tensor& bias, const RoutingOptions& options) {
  const RouterPass pass = router_pass(logits, bias, options);
  return {pass.choices, router_outputs(logits, options, pass).weights, {}, {}};
}

at::Tensor count_assignments(const at::Tensor& choices, const at::Tensor& padding, int64_t b,
                             int64_t num_experts) {
  const at::Tensor counts = at::zeros({b, num_experts}, choices.options().dtype(at::kInt));
  add_assignments(choices, {}, padding, counts);
  return counts;
}

// After the end of the iterations, whose number is only known on the device, the factors stay.
at::Tensor sinkhorn(const at::Tensor& logits) {
  const at::NoGradGuard no_grad;
  constexpr double kTolerance = 1e-4;
  const at::Tensor cost = logits.exp();
  if (cost.numel() == 0) return cost;
  at::Tensor d0 = at::ones({cost.size(0)}, cost.options());
  at::Tensor d1 = at::ones({cost.size(1)}, cost.options());
  at::Tensor done = at::zeros({}, cost.options().dtype(at::kBool));
  for (int i = 0; i < kMaxSinkhornIterations; ++i) {
    const auto [next, rows] = sinkhorn_iteration(cost, d1);
    d0 = at::where(done, d0, rows);
    const at::Tensor ended = at::logical_not((next - d1).abs().mean() > kTolerance);
    d1 = at::where(done, d1, next);
    done = at::logical_or(done, ended);
    if (cost.is_cpu() && done.item<bool>()) break;
  }
  return d1 * cost * d0.unsqueeze(1);
}

namespace {

at::Tensor sinkhorn_scores(const at::Tensor& logits, int64_t k) {
  return k == 1 ? at::sigmoid(logits) : logits.softmax(-1);
}

}  // namespace

at::Tensor sinkhorn_choices(const at::Tensor& logits, int64_t k, bool training) {
  const at::NoGradGuard no_grad;
  return top_experts(training ? sinkhorn(logits) : sinkhorn_scores(logits, k), k);
}

at::Tensor sinkhorn_weights(const at::Tensor& logits, const at::Tensor& choices) {
  return sinkhorn_scores(logits, choices.size(1)).gather(1, choices.to(at::kLong));
}

}  // namespace megatron
