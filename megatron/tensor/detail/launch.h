// Runs a kernel on its tensors' device: the CPU version over ranges of rows, or the CUDA version on
// the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "megatron/tensor/shape.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"

namespace megatron {

// The CUDA stream of the tensor's device. Throws Error in a build without CUDA.
void* current_stream(const at::Tensor& tensor);

// Minimum rows per task that make a thread worthwhile, for rows of `row_elements`.
int64_t rows_per_task(int64_t row_elements);

// The tensor itself if contiguous and of that type, else a copy.
at::Tensor as_contiguous(const at::Tensor& tensor, at::ScalarType type);

// Calls body(begin, end) over parts of the rows on ATen's threads; a row costs `row_elements`
// multiplications and additions.
void parallel_rows(int64_t rows, int64_t row_elements,
                   const std::function<void(int64_t begin, int64_t end)>& body);

// Calls cpu(begin, end) over rows of `row_elements`, or cuda(stream), depending on the device of
// `on`.
template <class Cpu, class Cuda>
void launch(const at::Tensor& on, int64_t rows, int64_t row_elements, const Cpu& cpu,
            const Cuda& cuda) {
  if (rows == 0) return;
  if (on.is_cuda()) {
    cuda(current_stream(on));
  } else {
    parallel_tasks(rows, rows_per_task(row_elements), cpu);
  }
}

}  // namespace megatron

// Wraps the call of a CUDA kernel in launch()'s last argument; empty in a build without CUDA, where
// current_stream() throws.
#ifdef MEGATRON_CUDA
#define MEGATRON_CUDA_KERNEL(...) __VA_ARGS__
#else
#define MEGATRON_CUDA_KERNEL(...) static_cast<void>(stream)
#endif
