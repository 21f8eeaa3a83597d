#include "megatron/tensor/sum_parts.h"

#include "megatron/base/check.h"
#include "megatron/kernels/sum_parts.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

void sum_parts(const std::vector<at::Tensor>& parts, at::Tensor target, bool accumulate) {
  SumParts args;
  args.num_parts = static_cast<int>(parts.size());
  MEGATRON_ASSERT(args.num_parts >= 1 && args.num_parts <= kMaxSumParts, "a sum of ",
                  args.num_parts, " parts");
  args.dtype = to_dtype(parts.front().scalar_type());
  args.target_dtype = to_dtype(target.scalar_type());
  args.count = target.numel();
  args.accumulate = accumulate;
  MEGATRON_ASSERT(target.is_contiguous(), "the target of a sum is contiguous");
  MEGATRON_ASSERT(target.scalar_type() == parts.front().scalar_type() ||
                      target.scalar_type() == accumulate_type(parts.front()),
                  "a sum of ", parts.front().toString(), " into ", target.toString());
  for (size_t i = 0; i < parts.size(); ++i) {
    MEGATRON_ASSERT(parts[i].is_contiguous() && parts[i].numel() == args.count &&
                        parts[i].scalar_type() == parts.front().scalar_type(),
                    "part ", i, " of a sum has ", parts[i].numel(), " elements of ",
                    parts[i].toString(), ", the target ", args.count);
    args.parts[i] = parts[i].const_data_ptr();
  }
  args.target = target.data_ptr();
  launch(
      target, args.count, args.num_parts,
      [&](int64_t begin, int64_t end) { sum_parts_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(sum_parts_cuda(args, stream)); });
}

}  // namespace megatron
