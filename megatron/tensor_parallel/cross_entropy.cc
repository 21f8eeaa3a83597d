#include "megatron/tensor_parallel/cross_entropy.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/cross_entropy.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, int64_t valid, double z_coeff,
                            const ProcessGroup* tp, at::Tensor* hits) {
    const TokenLosses parts = token_losses(logits, targets, valid, z_coeff, *tp);
    if (hits != nullptr) *hits = parts.target >= parts.largest;
    context->saved_data["valid"] = valid;
    context->saved_data["z_coeff"] = z_coeff;
    context->save_for_backward({logits, targets, parts.lse});
    return parts.loss;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor dlogits = cross_entropy_backward(
        saved[0], saved[1], saved[2], grads[0].contiguous(), context->saved_data["valid"].toInt(),
        context->saved_data["z_coeff"].toDouble(), /*in_place=*/true);
    // The logits' memory without their graph, which a deferred weight gradient would keep.
    return {dlogits.variable_data(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

// Targets relative to `first`, the first column of this part, and which of them are ignored.
struct LocalTargets {
  at::Tensor local, ignored;
};
LocalTargets local_targets(const at::Tensor& targets, int64_t first) {
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor ignored = flat < 0;
  return {first != 0 ? at::where(ignored, flat, flat - first) : flat, ignored};
}

int64_t valid_columns(int64_t vocab_size, int64_t first, int64_t columns) {
  return std::clamp<int64_t>(vocab_size - first, 0, columns);
}

}  // namespace

TokenLosses token_losses(const at::Tensor& logits, const at::Tensor& targets, int64_t valid,
                         double z_coeff, const ProcessGroup& tp) {
  CrossEntropyParts parts = cross_entropy_parts(logits, targets, valid);
  OverShards maximum, sum;
  if (tp.size() > 1) {
    maximum = [&](const at::Tensor& t) { tp.all_reduce(t, ReduceOp::kMax)->wait(); };
    sum = [&](const at::Tensor& t) { tp.all_reduce(t)->wait(); };
  }
  const at::Tensor lse = combine_parts(parts, maximum, sum);
  at::Tensor loss = lse - parts.target;
  if (z_coeff != 0.0) loss.addcmul_(lse, lse, z_coeff);
  return {loss, lse, parts.max, parts.target};
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        int64_t vocab_size, double z_coeff, const ProcessGroup& tp,
                                        at::Tensor* hits) {
  const int64_t s = targets.size(0), b = targets.size(1), columns = logits.size(-1);
  check_shape("vocab_parallel_cross_entropy logits", logits, {s, b, columns});
  const int64_t first = tp.rank() * columns;
  const int64_t valid = valid_columns(vocab_size, first, columns);
  const auto [local, ignored] = local_targets(targets, first);
  const at::Tensor loss = CrossEntropyFunction::apply(logits.reshape({s * b, columns}), local,
                                                      valid, z_coeff, &tp, hits);
  if (hits != nullptr) *hits = hits->view({s, b});
  return at::where(ignored, at::zeros({}, loss.options()), loss).view({s, b});
}

SplitCrossEntropy::SplitCrossEntropy(const at::Tensor& logits, const at::Tensor& targets,
                                     int64_t vocab_size, double z_coeff, int part)
    : s_(targets.size(0)), b_(targets.size(1)), z_coeff_(z_coeff) {
  const int64_t columns = logits.size(-1), first = part * columns;
  check_shape("SplitCrossEntropy logits", logits, {s_, b_, columns});
  valid_ = valid_columns(vocab_size, first, columns);
  logits_ = logits.detach().reshape({s_ * b_, columns});
  LocalTargets own = local_targets(targets, first);
  targets_ = std::move(own.local);
  ignored_ = std::move(own.ignored);
  const CrossEntropyParts parts = cross_entropy_parts(logits_, targets_, valid_);
  statistics_ = at::stack({parts.max, parts.sum, parts.target});
}

at::Tensor SplitCrossEntropy::loss(const at::Tensor& all) {
  check_shape("SplitCrossEntropy statistics", all, {-1, 3, s_ * b_});
  statistics_ = at::Tensor();
  const at::Tensor maxima = all.select(1, 0), max = maxima.amax(0);
  lse_ = (all.select(1, 1) * (maxima - max).exp_()).sum(0).log_().add_(max);
  at::Tensor loss = lse_ - all.select(1, 2).sum(0);
  if (z_coeff_ != 0.0) loss.addcmul_(lse_, lse_, z_coeff_);
  return loss.masked_fill_(ignored_, 0.0).view({s_, b_});
}

at::Tensor SplitCrossEntropy::backward(const at::Tensor& grad_loss) {
  MEGATRON_ASSERT(lse_.defined(), "the gradient of a loss that was not computed");
  const at::Tensor scale = grad_loss.reshape({-1}).masked_fill(ignored_, 0.0);
  const at::Tensor grad =
      cross_entropy_backward(logits_, targets_, lse_, scale, valid_, z_coeff_, /*in_place=*/true);
  return grad.view({s_, b_, -1});
}

}  // namespace megatron
