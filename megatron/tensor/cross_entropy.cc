#include "megatron/tensor/cross_entropy.h"

#include "megatron/base/check.h"
#include "megatron/kernels/cross_entropy.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

CrossEntropy make_args(const at::Tensor& logits, const at::Tensor& targets, int64_t valid) {
  check_shape("cross entropy logits", logits, {-1, -1});
  MEGATRON_ASSERT(logits.stride(1) == 1 || logits.size(1) <= 1,
                  "the rows of the logits must be contiguous");
  MEGATRON_ASSERT(valid >= 0 && valid <= logits.size(1), "cross entropy counts ", valid,
                  " columns of ", logits.size(1));
  CrossEntropy args;
  args.dtype = to_dtype(logits.scalar_type());
  args.tokens = logits.size(0);
  args.columns = logits.size(1);
  args.valid = valid;
  args.logits = logits.const_data_ptr();
  args.stride = logits.stride(0);
  check_shape("cross entropy targets", targets, {args.tokens});
  MEGATRON_ASSERT(targets.is_contiguous(), "cross entropy targets must be contiguous");
  args.targets = targets.const_data_ptr<int64_t>();
  return args;
}

}  // namespace

CrossEntropyParts cross_entropy_parts(const at::Tensor& logits, const at::Tensor& targets,
                                      int64_t valid) {
  const at::NoGradGuard no_grad;
  const CrossEntropy args = make_args(logits, targets, valid);
  CrossEntropyParts parts;
  parts.max = at::empty({args.tokens}, logits.options().dtype(accumulate_type(logits)));
  parts.sum = at::empty_like(parts.max);
  parts.target = at::empty_like(parts.max);
  const CrossEntropySums sums = {parts.max.data_ptr(), parts.sum.data_ptr(),
                                 parts.target.data_ptr()};
  launch(
      logits, args.tokens, args.columns,
      [&](int64_t begin, int64_t end) { cross_entropy_sums_cpu(args, sums, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(cross_entropy_sums_cuda(args, sums, stream)); });
  return parts;
}

at::Tensor combine_parts(CrossEntropyParts& parts, const OverShards& maximum,
                         const OverShards& sum) {
  if (maximum) {
    const at::Tensor own_max = parts.max.clone();
    maximum(parts.max);
    const at::Tensor both = at::stack({parts.sum * (own_max - parts.max).exp_(), parts.target});
    sum(both);
    parts.sum = both[0];
    parts.target = both[1];
  }
  return parts.sum.log_().add_(parts.max);
}

at::Tensor cross_entropy_backward(const at::Tensor& logits, const at::Tensor& targets,
                                  const at::Tensor& lse, const at::Tensor& scale, int64_t valid,
                                  double z_coeff, bool in_place) {
  const at::NoGradGuard no_grad;
  const CrossEntropy args = make_args(logits, targets, valid);
  check_shape("cross entropy lse", lse, {args.tokens});
  check_shape("cross entropy scale", scale, {args.tokens});
  const at::Tensor sums = as_contiguous(lse, accumulate_type(logits));
  const at::Tensor scales = as_contiguous(scale, accumulate_type(logits));
  at::Tensor dlogits = in_place ? logits : at::empty(logits.sizes(), logits.options());
  CrossEntropyBackward backward;
  backward.lse = sums.const_data_ptr();
  backward.scale = scales.const_data_ptr();
  backward.z_coeff = z_coeff;
  backward.dlogits = dlogits.data_ptr();
  backward.stride = dlogits.stride(0);
  launch(
      logits, args.tokens, args.columns,
      [&](int64_t begin, int64_t end) { cross_entropy_backward_cpu(args, backward, begin, end); },
      [&](void* stream) {
        MEGATRON_CUDA_KERNEL(cross_entropy_backward_cuda(args, backward, stream));
      });
  return dlogits;
}

}  // namespace megatron
