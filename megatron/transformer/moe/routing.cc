#include "megatron/transformer/moe/routing.h"

#include <limits>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kSmallest = 1e-20;  // added to sums of scores that divide

// Descending, equal ones in their order; NaN comes first.
at::Tensor descending_order(const at::Tensor& scores) {
  return std::get<1>(at::sort(scores, /*stable=*/true, /*dim=*/-1, /*descending=*/true));
}

at::Tensor highest(const at::Tensor& scores, int64_t k) {
  return scores.gather(-1, descending_order(scores).narrow(-1, 0, k));
}

// sqrt(ln(1 + e^l)). Where e^l is 0 in this type, so are value and gradient.
at::Tensor sqrt_softplus(const at::Tensor& logits) {
  const at::Tensor softplus = at::logaddexp(logits, at::zeros({}, logits.options()));
  const at::Tensor is_zero = softplus == 0;
  return softplus.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0);
}

// Of single experts: sigmoid, sqrtsoftplus.
at::Tensor expert_scores(const at::Tensor& logits, RouterScore score) {
  return score == RouterScore::kSigmoid ? at::sigmoid(logits) : sqrt_softplus(logits);
}

// By which experts are chosen.
at::Tensor selection_scores(const at::Tensor& logits, const at::Tensor& bias,
                            const RoutingOptions& options) {
  if (options.score == RouterScore::kSoftmax) {
    MEGATRON_ASSERT(!bias.defined(), "an expert bias with softmax scores");
    return options.pre_softmax ? logits.softmax(-1) : logits;
  }
  const at::Tensor scores = expert_scores(logits, options.score);
  return bias.defined() ? scores + bias.to(scores.scalar_type()) : scores;
}

// Scores with -inf for experts outside the best groups of a token.
at::Tensor within_groups(const at::Tensor& scores, const RoutingOptions& options) {
  const int64_t n = scores.size(0), groups = options.num_groups;
  MEGATRON_ASSERT(scores.size(1) % groups == 0 && options.group_topk > 0 &&
                      options.group_topk <= groups &&
                      options.topk <= options.group_topk * (scores.size(1) / groups),
                  options.topk, " of ", scores.size(1), " experts in ", options.group_topk, " of ",
                  groups, " groups");
  const at::Tensor grouped = scores.reshape({n, groups, scores.size(1) / groups});
  const int64_t summed =
      options.group_score == GroupScore::kMax ? 1 : options.topk / options.group_topk;
  const at::Tensor group_scores = highest(grouped, summed).sum(-1);
  const at::Tensor kept = descending_order(group_scores).narrow(-1, 0, options.group_topk);
  const at::Tensor outside =
      at::ones({n, groups}, scores.options().dtype(at::kBool)).scatter(-1, kept, false);
  return grouped.masked_fill(outside.unsqueeze(-1), -std::numeric_limits<double>::infinity())
      .reshape(scores.sizes());
}

void check_logits(const at::Tensor& logits, int64_t k) {
  check_shape("logits of the router", logits, {-1, -1});
  MEGATRON_ASSERT(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
                  "logits of the router in ", toString(logits.scalar_type()));
  MEGATRON_ASSERT(0 < k && k <= logits.size(1), k, " of ", logits.size(1), " experts");
}

// The factors of the columns after one iteration, {d1, d0}.
std::pair<at::Tensor, at::Tensor> sinkhorn_iteration(const at::Tensor& cost, const at::Tensor& d1) {
  constexpr double kEpsilon = 1e-8;
  const auto rows = static_cast<double>(cost.size(0)), columns = static_cast<double>(cost.size(1));
  const at::Tensor d0 = ((d1 * cost).sum(1) + kEpsilon).mul_(rows).reciprocal_();
  return {((d0.unsqueeze(1) * cost).sum(0) + kEpsilon).mul_(columns).reciprocal_(), d0};
}

}  // namespace

at::Tensor top_experts(const at::Tensor& scores, int64_t k) {
  return descending_order(scores).narrow(-1, 0, k).to(at::kInt);
}

at::Tensor choose_experts(const at::Tensor& logits, const at::Tensor& bias,
                          const RoutingOptions& options) {
  check_logits(logits, options.topk);
  const at::NoGradGuard no_grad;
  at::Tensor scores = selection_scores(logits.detach(), bias, options);
  if (options.num_groups > 0) scores = within_groups(scores, options);
  return top_experts(scores, options.topk);
}

at::Tensor routing_weights(const at::Tensor& logits, const at::Tensor& choices,
                           const RoutingOptions& options) {
  check_logits(logits, options.topk);
  check_shape("choices of the router", choices, {logits.size(0), options.topk});
  const at::Tensor index = choices.to(at::kLong);
  at::Tensor weights;
  if (options.score != RouterScore::kSoftmax) {
    weights = expert_scores(logits.gather(1, index), options.score);
    if (options.topk > 1) weights = weights / (weights.sum(1, /*keepdim=*/true) + kSmallest);
  } else if (options.pre_softmax) {
    weights = logits.softmax(-1).gather(1, index);
  } else {
    weights = logits.gather(1, index).softmax(-1);
  }
  return options.scaling_factor == 0.0 ? weights : weights * options.scaling_factor;
}

Routing route(const at::Tensor& logits, const at::Tensor& bias, const RoutingOptions& options) {
  const at::Tensor choices = choose_experts(logits, bias, options);
  return {choices, routing_weights(logits, choices, options), {}, {}};
}

at::Tensor score_shares(const at::Tensor& logits, RouterScore score) {
  if (score == RouterScore::kSoftmax) return logits.softmax(-1);
  const at::Tensor scores = expert_scores(logits, score);
  return scores / (scores.sum(-1, /*keepdim=*/true) + kSmallest);
}

at::Tensor count_assignments(const at::Tensor& choices, const at::Tensor& counted, int64_t b,
                             int64_t num_experts) {
  const auto integers = choices.options().dtype(at::kInt);
  const int64_t n = choices.size(0);
  MEGATRON_ASSERT(b > 0 && n % b == 0, n, " rows of ", b, " sequences");
  const at::Tensor sequence = at::arange(b, integers.dtype(at::kLong)).repeat({n / b}).unsqueeze(1);
  const at::Tensor ones = counted.defined() ? counted.to(at::kInt).expand_as(choices)
                                            : at::ones({1, 1}, integers).expand_as(choices);
  return at::zeros({b * num_experts}, integers)
      .scatter_add_(0, (sequence * num_experts + choices).flatten(), ones.flatten())
      .view({b, num_experts});
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
  check_logits(logits, k);
  const at::NoGradGuard no_grad;
  return top_experts(training ? sinkhorn(logits) : sinkhorn_scores(logits, k), k);
}

at::Tensor sinkhorn_weights(const at::Tensor& logits, const at::Tensor& choices) {
  return sinkhorn_scores(logits, choices.size(1)).gather(1, choices.to(at::kLong));
}

}  // namespace megatron
