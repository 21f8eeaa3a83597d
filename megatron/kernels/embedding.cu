#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/embedding.h"

namespace megatron {
namespace {

// One block per id; rows are copied as words of `Word`.
template <class Word>
__global__ void embedding_forward_kernel(EmbeddingForward args, int64_t words) {
  const int64_t i = blockIdx.x, id = args.ids[i];
  const Word* from = static_cast<const Word*>(args.weight) + (id < 0 ? 0 : id) * words;
  Word* to = static_cast<Word*>(args.out) + i * words;
  for (int64_t j = threadIdx.x; j < words; j += blockDim.x) to[j] = id < 0 ? Word(0) : from[j];
}

// The block of the first occurrence of an id adds all its rows, in the order of their places.
template <class T, class Acc>
__global__ void embedding_backward_kernel(EmbeddingBackward args) {
  const int64_t first = blockIdx.x, id = args.ids[first], n = args.columns;
  if (id < 0 || id >= args.vocabulary || (first > 0 && args.ids[first - 1] == id)) return;
  const T* dy = static_cast<const T*>(args.dy);
  Acc* target = static_cast<Acc*>(args.target) + id * n;
  for (int64_t j = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; j < n; j += int64_t{gridDim.y} * blockDim.x) {
    Acc total = target[j];
    for (int64_t i = first; i < args.count && args.ids[i] == id; ++i) total += load_as<Acc>(dy[args.order[i] * n + j]);
    target[j] = total;
  }
}

}  // namespace

void embedding_forward_cuda(const EmbeddingForward& args, void* stream) {
  const auto blocks = static_cast<unsigned>(args.count);
  if (args.row_bytes % 8 == 0) {
    embedding_forward_kernel<uint64_t><<<blocks, 128, 0, as_stream(stream)>>>(args, args.row_bytes / 8);
  } else {
    embedding_forward_kernel<uint16_t><<<blocks, 128, 0, as_stream(stream)>>>(args, args.row_bytes / 2);
  }
  check_cuda(cudaGetLastError(), "embedding forward");
}

void embedding_backward_cuda(const EmbeddingBackward& args, void* stream) {
  const dim3 grid(static_cast<unsigned>(args.count), static_cast<unsigned>((args.columns + 127) / 128));
  with_cuda_type(args.dtype, [&](auto type) {
    if (args.target_dtype == DType::kFloat64) {
      embedding_backward_kernel<decltype(type), double><<<grid, 128, 0, as_stream(stream)>>>(args);
    } else {
      embedding_backward_kernel<decltype(type), float><<<grid, 128, 0, as_stream(stream)>>>(args);
    }
  });
  check_cuda(cudaGetLastError(), "embedding backward");
}

}  // namespace megatron
