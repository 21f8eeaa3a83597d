#include "megatron/tensor/detail/launch.h"

#include <algorithm>

#include "megatron/base/check.h"
#ifdef MEGATRON_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace megatron {

#ifdef MEGATRON_CUDA
void* current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
}
#else
void* current_stream(const at::Tensor& tensor) {
  throw_error(cat("a tensor lies on ", tensor.device().str(),
                  " but this build has no CUDA kernels\n",
                  "hint: configure with -DMEGATRON_CUDA=ON"));
}
#endif

int64_t rows_per_task(int64_t row_elements) {
  constexpr int64_t kTaskElements = 16384;  // about 10 us of work
  return std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, row_elements));
}

at::Tensor as_contiguous(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.to(type).contiguous();
}

}  // namespace megatron
