#include "megatron/training/tasks/dpo_loss.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Sum over the context-parallel ranks. Each rank contributes 1/c of the loss that is computed from
// it, so the gradient of the whole is c times that of the rank's share.
struct SumOverContext : torch::autograd::Function<SumOverContext> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const ProcessGroup* cp) {
    context->saved_data["ranks"] = static_cast<int64_t>(cp->size());
    const at::Tensor sum = x.clone();
    cp->all_reduce(sum)->wait();
    return sum;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {grads[0] * context->saved_data["ranks"].toInt(), at::Tensor()};
  }
};

at::Tensor over_context(const at::Tensor& x, const ProcessGroup& cp) {
  return cp.size() == 1 ? x : SumOverContext::apply(x, &cp);
}

at::Tensor every_second(const at::Tensor& x, int64_t first) { return x.slice(0, first, {}, 2); }

}  // namespace

at::Tensor sequence_log_probs(const at::Tensor& token_losses, const at::Tensor& loss_mask,
                              const ProcessGroup& cp) {
  check_shape("loss_mask", loss_mask, {token_losses.size(1), token_losses.size(0)});
  const at::Tensor mask = loss_mask.t().to(token_losses.scalar_type());
  return over_context((token_losses * mask).sum(0).neg(), cp);
}

at::Tensor halves_of_pairs(const at::Tensor& mask_sums) {
  const at::Tensor of_pairs = mask_sums.view({-1, 2}).sum(1, /*keepdim=*/true);
  return of_pairs.gt(0).to(mask_sums.scalar_type()).mul_(0.5).expand({-1, 2}).reshape({-1});
}

DpoLoss dpo_loss(const at::Tensor& token_losses, const at::Tensor& loss_mask,
                 const at::Tensor& reference, const DpoOptions& options, const ProcessGroup& cp) {
  const int64_t b = token_losses.size(1);
  MEGATRON_CHECK(b % 2 == 0, "a micro-batch of ", b, " sequences holds no whole number of pairs",
                 "\nhint: --micro-batch-size counts sequences, two for each pair");
  const at::Tensor log_probs = sequence_log_probs(token_losses, loss_mask, cp);
  check_shape("reference", reference, {b});
  const at::Tensor rewards = options.beta * (log_probs - reference.to(log_probs.scalar_type()));
  const at::Tensor chosen = every_second(rewards, 0), rejected = every_second(rewards, 1);
  const at::Tensor margin = chosen - rejected;
  const double e = options.label_smoothing;
  at::Tensor losses = at::log_sigmoid(margin) * (e - 1.0);
  if (e > 0) losses = losses - e * at::log_sigmoid(-margin);
  at::Tensor lengths;  // [b] number of response tokens
  {
    const at::NoGradGuard no_grad;
    lengths = over_context(loss_mask.sum(1).to(log_probs.scalar_type()), cp);
  }
  if (options.sft_weight > 0)
    losses = losses - options.sft_weight * every_second(log_probs, 0) /
                          at::clamp_min(every_second(lengths, 0), 1);
  const at::Tensor share =
      (every_second(lengths, 0) + every_second(lengths, 1)).gt(0).to(losses.scalar_type()) /
      static_cast<double>(cp.size());
  DpoLoss out;
  out.loss = {(losses * share).sum(), share.sum()};
  const at::NoGradGuard no_grad;
  const auto sum = [&](const at::Tensor& x) { return (x * share).sum().to(at::kDouble); };
  out.metrics = at::stack(
      {sum(chosen), sum(rejected), sum(margin), sum(margin.gt(0).to(share.scalar_type()))});
  return out;
}

}  // namespace megatron
