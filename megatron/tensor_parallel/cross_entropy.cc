#include "megatron/tensor_parallel/cross_entropy.h"

#include <algorithm>

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
                            const ProcessGroup* tp) {
    const TokenLosses parts = token_losses(logits, targets, valid, z_coeff, *tp);
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
    return {dlogits, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

TokenLosses token_losses(const at::Tensor& logits, const at::Tensor& targets, int64_t valid,
                         double z_coeff, const ProcessGroup& tp) {
  CrossEntropyParts parts = cross_entropy_parts(logits, targets, valid);
  if (tp.size() > 1) {
    const at::Tensor own_max = parts.max.clone();
    tp.all_reduce(parts.max, ReduceOp::kMax)->wait();
    const at::Tensor both = at::stack({parts.sum * (own_max - parts.max).exp_(), parts.target});
    tp.all_reduce(both)->wait();
    parts.sum = both[0];
    parts.target = both[1];
  }
  const at::Tensor lse = parts.sum.log_().add_(parts.max);
  at::Tensor loss = lse - parts.target;
  if (z_coeff != 0.0) loss.addcmul_(lse, lse, z_coeff);
  return {loss, lse};
}

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                        int64_t vocab_size, double z_coeff,
                                        const ProcessGroup& tp) {
  const int64_t s = targets.size(0), b = targets.size(1), columns = logits.size(-1);
  check_shape("vocab_parallel_cross_entropy logits", logits, {s, b, columns});
  const int64_t first = tp.rank() * columns;
  const int64_t valid = std::clamp<int64_t>(vocab_size - first, 0, columns);
  at::Tensor local = targets.reshape({-1});
  const at::Tensor ignored = local < 0;
  if (first != 0) local = at::where(ignored, local, local - first);
  const at::Tensor loss =
      CrossEntropyFunction::apply(logits.reshape({s * b, columns}), local, valid, z_coeff, &tp);
  return at::where(ignored, at::zeros({}, loss.options()), loss).view({s, b});
}

}  // namespace megatron
