#include "megatron/tensor/experts/routing.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Rows of a sum share a part: enough parts for all processors of a GPU, and few to add up.
constexpr int64_t kParts = 256, kRowsOfPart = 8;

const bool* flags_of(const at::Tensor& flags) {
  return flags.defined() ? flags.const_data_ptr<bool>() : nullptr;
}

void check_options(const RoutingOptions& options, int64_t experts, bool biased) {
  MEGATRON_ASSERT(0 < options.topk && options.topk <= experts, options.topk, " of ", experts,
                  " experts");
  MEGATRON_ASSERT(!biased || options.score != RouterScore::kSoftmax,
                  "an expert bias with softmax scores");
  if (options.num_groups == 0) return;
  MEGATRON_ASSERT(options.num_groups > 0 && experts % options.num_groups == 0 &&
                      options.group_topk > 0 && options.group_topk <= options.num_groups &&
                      options.topk <= options.group_topk * (experts / options.num_groups),
                  options.topk, " of ", experts, " experts in ", options.group_topk, " of ",
                  options.num_groups, " groups");
}

// The tensors must outlive the result.
RouterRows rows_of(const at::Tensor& logits, const RoutingOptions& options,
                   const RouterSums& sums) {
  check_shape("logits of the router", logits, {-1, -1});
  MEGATRON_ASSERT(logits.scalar_type() == at::kFloat || logits.scalar_type() == at::kDouble,
                  "logits of the router in ", toString(logits.scalar_type()));
  MEGATRON_ASSERT(logits.is_contiguous(), "logits of the router must be contiguous");
  RouterRows rows;
  rows.dtype = to_dtype(logits.scalar_type());
  rows.rows = logits.size(0);
  rows.experts = logits.size(1);
  rows.logits = logits.const_data_ptr();
  rows.sequences = sums.sequences;
  MEGATRON_ASSERT(sums.sequences > 0 && rows.rows % sums.sequences == 0, rows.rows, " rows of ",
                  sums.sequences, " sequences");
  if (sums.padding.defined()) check_shape("padding of the router", sums.padding, {rows.rows});
  rows.padding = flags_of(sums.padding);
  rows.options = options;
  return rows;
}

int64_t parts_of(const RouterRows& rows, bool sums) {
  const int64_t positions = rows.rows / rows.sequences;
  const int64_t parts = std::max<int64_t>(1, (positions + kRowsOfPart - 1) / kRowsOfPart);
  return sums ? std::min(parts, std::max<int64_t>(1, kParts / rows.sequences)) : parts;
}

// What is defined in `pass`, and the sums.
void run(const at::Tensor& logits, const at::Tensor& bias, const RoutingOptions& options,
         bool choices_given, const RouterSums& wanted, RouterPass& pass) {
  const at::NoGradGuard no_grad;
  const at::Tensor contiguous = logits.contiguous();
  RouterSums sums = wanted;
  if (sums.padding.defined()) sums.padding = sums.padding.contiguous();
  const RouterRows rows = rows_of(contiguous, options, sums);
  check_options(options, rows.experts, bias.defined());
  at::Tensor added;
  RouterForward args;
  if (bias.defined()) {
    check_shape("expert bias", bias, {rows.experts});
    added = as_contiguous(bias, logits.scalar_type());
    args.bias = added.const_data_ptr();
  }
  args.choices_given = choices_given;
  if (pass.choices.defined()) args.choices = pass.choices.data_ptr<int32_t>();
  if (pass.weights.defined()) args.weights = pass.weights.data_ptr();
  args.parts = parts_of(rows, sums.shares);
  if (sums.counts) {
    pass.counts = at::zeros({sums.sequences, rows.experts}, logits.options().dtype(at::kInt));
    args.counts = pass.counts.data_ptr<int32_t>();
  }
  if (sums.shares) {
    pass.sums = at::empty({sums.sequences, rows.experts + kMoreSums, args.parts},
                          logits.options().dtype(at::kDouble));
    args.sums = pass.sums.data_ptr<double>();
    args.squares = sums.squares;
  }
  launch(
      logits, args.parts * rows.sequences,
      rows.experts * std::max<int64_t>(1, rows.rows / rows.sequences / args.parts),
      [&](int64_t begin, int64_t end) { router_forward_cpu(rows, args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(router_forward_cuda(rows, args, stream)); });
}

at::Tensor choices_like(const at::Tensor& logits, int64_t topk) {
  return at::empty({logits.size(0), topk}, logits.options().dtype(at::kInt).requires_grad(false));
}

}  // namespace

RouterPass router_pass(const at::Tensor& logits, const at::Tensor& bias,
                       const RoutingOptions& options, const at::Tensor& choices,
                       const RouterSums& sums) {
  RouterPass pass;
  if (choices.defined()) {
    check_shape("choices of the router", choices, {logits.size(0), options.topk});
    pass.choices = as_contiguous(choices, at::kInt);
  } else {
    pass.choices = choices_like(logits, options.topk);
  }
  pass.weights = at::empty({logits.size(0), options.topk}, logits.options().requires_grad(false));
  run(logits, bias, options, choices.defined(), sums, pass);
  return pass;
}

at::Tensor router_choices(const at::Tensor& logits, const at::Tensor& bias,
                          const RoutingOptions& options) {
  RouterPass pass;
  pass.choices = choices_like(logits, options.topk);
  run(logits, bias, options, /*choices_given=*/false, {}, pass);
  return pass.choices;
}

RouterPass router_sums(const at::Tensor& logits, const RoutingOptions& options,
                       const RouterSums& sums) {
  RouterPass pass;
  run(logits, {}, options, /*choices_given=*/false, sums, pass);
  return pass;
}

namespace {

BalanceLosses balance_of(const RouterLosses& losses, int64_t experts, int64_t topk) {
  BalanceLosses balance;
  balance.experts = experts;
  balance.topk = topk;
  balance.sequences = losses.of_sequence.numel();
  std::copy(losses.coefficients.begin(), losses.coefficients.end(), balance.coefficient);
  balance.of_sequence = losses.of_sequence.const_data_ptr<double>();
  return balance;
}

}  // namespace

RouterLosses router_losses(const RouterPass& pass, const at::Tensor& step_counts,
                           const at::Tensor& of_sequence, int64_t topk,
                           const std::array<double, kBalanceTerms>& coefficients) {
  const at::NoGradGuard no_grad;
  const int64_t b = pass.sums.size(0), experts = pass.sums.size(1) - kMoreSums;
  check_shape("weights of sequences", of_sequence, {b});
  RouterLosses result;
  result.coefficients = coefficients;
  result.of_sequence = as_contiguous(of_sequence, at::kDouble);
  result.weights = at::empty({kBalanceTerms}, pass.sums.options());
  result.shares = at::empty({b + 2, experts}, pass.sums.options());
  const BalanceLosses losses = balance_of(result, experts, topk);
  BalanceForward args;
  args.sums = pass.sums.const_data_ptr<double>();
  args.parts = pass.sums.size(2);
  at::Tensor counts, global;
  if (pass.counts.defined()) {
    check_shape("counts of the router", pass.counts, {b, experts});
    counts = as_contiguous(pass.counts, at::kInt);
    args.counts = counts.const_data_ptr<int32_t>();
  }
  if (step_counts.defined()) {
    check_shape("counts of the step", step_counts, {experts});
    global = as_contiguous(step_counts, at::kLong);
    args.step_counts = global.const_data_ptr<int64_t>();
  }
  args.shares = result.shares.data_ptr<double>();
  args.weights = result.weights.data_ptr<double>();
  for (size_t i = 0; i < kBalanceTerms; ++i) {
    if (coefficients[i] == 0.0) continue;
    result.losses[i] = at::empty({}, pass.sums.options());
    args.losses[i] = result.losses[i].data_ptr<double>();
  }
  launch(
      pass.sums, 1, 1, [&](int64_t, int64_t) { balance_losses_cpu(losses, args); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(balance_losses_cuda(losses, args, stream)); });
  return result;
}

at::Tensor router_backward(const at::Tensor& logits, const RoutingOptions& options,
                           const at::Tensor& choices, const at::Tensor& dweights,
                           const RouterSums& sums, const RouterLosses& losses,
                           const std::array<at::Tensor, kBalanceTerms>& dlosses) {
  const at::NoGradGuard no_grad;
  const at::Tensor contiguous = logits.contiguous();
  const RouterRows rows = rows_of(contiguous, options, sums);
  at::Tensor dlogits = at::empty(logits.sizes(), logits.options().requires_grad(false));
  RouterBackward args;
  args.dlogits = dlogits.data_ptr();
  at::Tensor dw;
  if (dweights.defined()) {
    check_shape("gradient of routing weights", dweights, {rows.rows, options.topk});
    check_shape("choices of the router", choices, {rows.rows, options.topk});
    dw = as_contiguous(dweights, logits.scalar_type());
    args.dweights = dw.const_data_ptr();
    args.choices = choices.const_data_ptr<int32_t>();
  }
  std::array<at::Tensor, kBalanceTerms> gradients;
  for (size_t i = 0; i < kBalanceTerms; ++i) {
    if (!dlosses[i].defined()) continue;
    gradients[i] = as_contiguous(dlosses[i], at::kDouble);
    args.dlosses[i] = gradients[i].const_data_ptr<double>();
  }
  if (losses.of_sequence.defined()) {
    args.balance = balance_of(losses, rows.experts, options.topk);
    args.shares = losses.shares.const_data_ptr<double>();
  }
  launch(
      logits, rows.rows, rows.experts,
      [&](int64_t begin, int64_t end) { router_backward_cpu(rows, args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(router_backward_cuda(rows, args, stream)); });
  return dlogits;
}

void add_assignments(const at::Tensor& choices, const at::Tensor& kept, const at::Tensor& padding,
                     const at::Tensor& counts) {
  const at::NoGradGuard no_grad;
  check_shape("choices", choices, {-1, -1});
  check_shape("counts of assignments", counts, {-1, -1});
  MEGATRON_ASSERT(counts.is_contiguous() && counts.scalar_type() == at::kInt,
                  "counts of assignments are contiguous int32");
  AssignmentCounts args;
  args.rows = choices.size(0);
  args.topk = choices.size(1);
  args.sequences = counts.size(0);
  args.experts = counts.size(1);
  MEGATRON_ASSERT(args.sequences > 0 && args.rows % args.sequences == 0, args.rows, " rows of ",
                  args.sequences, " sequences");
  if (kept.defined()) check_shape("kept choices", kept, {args.rows, args.topk});
  if (padding.defined()) check_shape("padding of choices", padding, {args.rows});
  const at::Tensor own = as_contiguous(choices, at::kInt),
                   keeps = kept.defined() ? kept.contiguous() : kept,
                   pads = padding.defined() ? padding.contiguous() : padding;
  args.choices = own.const_data_ptr<int32_t>();
  args.kept = flags_of(keeps);
  args.padding = flags_of(pads);
  args.counts = counts.data_ptr<int32_t>();
  if (args.rows == 0) return;
  launch(
      counts, 1, 1, [&](int64_t, int64_t) { count_assignments_cpu(args); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(count_assignments_cuda(args, stream)); });
}

}  // namespace megatron
