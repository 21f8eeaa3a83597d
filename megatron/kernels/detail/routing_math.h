// The scalar formulas of kernels/experts/routing.h, shared by the CPU and CUDA kernels.
#pragma once

#include "megatron/kernels/detail/math.h"
#include "megatron/kernels/experts/routing.h"

namespace megatron {

// ln x for x >= 1 or NaN.
MEGATRON_HOST_DEVICE float log_of_sum(float x) { return x != x ? x : fast_log(x); }
MEGATRON_HOST_DEVICE double log_of_sum(double x) { return log(x); }

// ln(1 + y) for y in [0, 1] or NaN.
MEGATRON_HOST_DEVICE float log_of_one_more(float y) {
  const float u = 1.0f + y;
  return u == 1.0f ? y : fast_log(u) * (y / (u - 1.0f));
}
MEGATRON_HOST_DEVICE double log_of_one_more(double y) { return log1p(y); }

MEGATRON_HOST_DEVICE float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}
MEGATRON_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// s of single experts: sigmoid, sqrtsoftplus.
template <class Acc>
MEGATRON_HOST_DEVICE Acc expert_score(Acc logit, RouterScore score) {
  if (score == RouterScore::kSigmoid) return fast_sigmoid(logit);
  const Acc small = log_of_one_more(fast_exp(logit > Acc(0) ? -logit : logit));
  return square_root(logit > Acc(0) ? logit + small : small);
}

// ds/dl. Where sqrtsoftplus underflows to 0, so does its slope.
template <class Acc>
MEGATRON_HOST_DEVICE Acc score_slope(Acc logit, Acc score, RouterScore kind) {
  if (kind == RouterScore::kSigmoid) return score * (Acc(1) - score);
  return score == Acc(0) ? Acc(0) : fast_sigmoid(logit) / (Acc(2) * score);
}

template <class Acc>
MEGATRON_HOST_DEVICE Acc with_smallest(Acc sum) {
  return sum + Acc(1e-20);
}

// Of weights: 1 if there is none.
template <class Acc>
MEGATRON_HOST_DEVICE Acc weight_scale(const RoutingOptions& options) {
  return options.scaling_factor == 0.0 ? Acc(1) : static_cast<Acc>(options.scaling_factor);
}

// Of a group, that rank it.
MEGATRON_HOST_DEVICE int64_t scores_of_group(const RoutingOptions& options) {
  return options.group_score == GroupScore::kMax ? 1 : options.topk / options.group_topk;
}

// Whether the k highest shares of a row are its choices.
MEGATRON_HOST_DEVICE bool chooses_by_share(const RouterRows& rows, const RouterForward& args) {
  return args.choices != nullptr && !args.choices_given && args.bias == nullptr &&
         rows.options.num_groups == 0;
}

}  // namespace megatron
