#include "megatron/tensor/embedding.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/kernels/embedding.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor embedding_forward(const at::Tensor& weight, const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  check_shape("embedding weight", weight, {-1, -1});
  MEGATRON_ASSERT(ids.scalar_type() == at::kLong, "embedding ids are ",
                  c10::toString(ids.scalar_type()), ", expected int64");
  const at::Tensor table = weight.contiguous(), places = ids.contiguous();
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  at::Tensor out = at::empty(shape, weight.options());
  EmbeddingForward args;
  args.row_bytes = weight.size(1) * static_cast<int64_t>(weight.element_size());
  args.count = places.numel();
  args.weight = table.const_data_ptr();
  args.ids = places.const_data_ptr<int64_t>();
  args.out = out.data_ptr();
  launch(
      weight, args.count, weight.size(1),
      [&](int64_t begin, int64_t end) { embedding_forward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(embedding_forward_cuda(args, stream)); });
  return out;
}

void embedding_backward(const at::Tensor& dy, const at::Tensor& ids, at::Tensor target) {
  const at::NoGradGuard no_grad;
  check_shape("embedding gradient", target, {-1, dy.size(-1)});
  const at::ScalarType type = target.scalar_type();
  MEGATRON_ASSERT(target.is_contiguous() && (type == at::kFloat || type == at::kDouble),
                  "embedding gradient target must be contiguous fp32 or fp64, found ",
                  c10::toString(type));
  MEGATRON_ASSERT(dy.numel() == ids.numel() * dy.size(-1), "embedding gradient of ", dy.numel(),
                  " elements for ", ids.numel(), " ids");
  const at::Tensor grad = dy.contiguous();
  at::Tensor places = ids.reshape({-1}).contiguous(), order;
  if (places.is_cuda())
    std::tie(places, order) = at::sort(places, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  EmbeddingBackward args;
  args.dtype = to_dtype(grad.scalar_type());
  args.target_dtype = to_dtype(type);
  args.columns = grad.size(-1);
  args.count = places.numel();
  args.vocabulary = target.size(0);
  args.dy = grad.const_data_ptr();
  args.ids = places.const_data_ptr<int64_t>();
  args.order = order.defined() ? order.const_data_ptr<int64_t>() : nullptr;
  args.target = target.data_ptr();
  const int64_t threads =
      std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), args.count / 64));
  if (grad.is_cuda()) {
    launch(
        grad, args.count, args.columns, [](int64_t, int64_t) {},
        [&](void* stream) { MEGATRON_CUDA_KERNEL(embedding_backward_cuda(args, stream)); });
  } else {
    parallel_tasks(args.vocabulary, (args.vocabulary + threads - 1) / threads,
                   [&](int64_t begin, int64_t end) { embedding_backward_cpu(args, begin, end); });
  }
}

}  // namespace megatron
