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

// The block of an id's first occurrence adds all its rows, in the order of their positions; each
// thread adds one group of columns. A warp searches 32 positions at a time and keeps several rows
// in flight, as frequent ids of a text have hundreds.
constexpr unsigned kBackwardThreads = 64;
constexpr int kRowsTogether = 8;

template <class T, class Acc, class Group>
__global__ void embedding_backward_kernel(EmbeddingBackward args) {
  constexpr int kSize = Group::kSize;
  const int64_t first = blockIdx.x, id = args.ids[first], n = args.columns;
  if (id < 0 || id >= args.vocabulary || (first > 0 && args.ids[first - 1] == id)) return;
  const int64_t column = (int64_t{blockIdx.y} * kBackwardThreads + threadIdx.x) * kSize;
  const bool inside = column < n;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* dy = static_cast<const T*>(args.dy) + column;
  Acc* target = static_cast<Acc*>(args.target) + id * n + column;
  Acc total[kSize] = {};
  if (inside) {
    if constexpr (kSize == 1) {
      total[0] = *target;
    } else {
      load_run(target, total);
    }
  }
  for (int64_t begin = first, same = 32; same == 32; begin += 32) {
    const int64_t at = begin + lane;
    const int64_t place = at < args.count ? args.order[at] : 0;
    same = __popc(__ballot_sync(0xffffffffu, at < args.count && args.ids[at] == id));
    for (int k = 0; k < same; k += kRowsTogether) {
      Group rows[kRowsTogether] = {};
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
        const int64_t from = __shfl_sync(0xffffffffu, place, (k + r) % 32);
        if (inside && k + r < same) rows[r] = load_group<Group>(dy + from * n);
      }
#pragma unroll
      for (int r = 0; r < kRowsTogether; ++r) {
        if (k + r >= same) break;
#pragma unroll
        for (int j = 0; j < kSize; ++j) total[j] += load_as<Acc>(rows[r].at[j]);
      }
    }
  }
  if (!inside) return;
  if constexpr (kSize == 1) {
    *target = total[0];
  } else {
    store_run(target, total);
  }
}

template <class T, class Acc, class Group>
void launch_backward(const EmbeddingBackward& args, cudaStream_t stream) {
  constexpr int64_t kColumns = int64_t{kBackwardThreads} * Group::kSize;
  const dim3 grid(static_cast<unsigned>(args.count),
                  static_cast<unsigned>((args.columns + kColumns - 1) / kColumns));
  embedding_backward_kernel<T, Acc, Group><<<grid, kBackwardThreads, 0, stream>>>(args);
}

template <class T, class Acc>
void backward(const EmbeddingBackward& args, cudaStream_t stream) {
  if constexpr (Pack<T>::kSize % Pack<Acc>::kSize == 0) {
    if (fits_packs<T>(args.columns, {args.dy, args.target}))
      return launch_backward<T, Acc, Pack<T>>(args, stream);
  }
  launch_backward<T, Acc, Single<T>>(args, stream);
}

}  // namespace

void embedding_forward_cuda(const EmbeddingForward& args, void* stream) {
  const auto blocks = static_cast<unsigned>(args.count);
  if (args.row_bytes % 8 == 0) {
    embedding_forward_kernel<uint64_t>
        <<<blocks, 128, 0, as_stream(stream)>>>(args, args.row_bytes / 8);
  } else {
    embedding_forward_kernel<uint16_t>
        <<<blocks, 128, 0, as_stream(stream)>>>(args, args.row_bytes / 2);
  }
  check_cuda(cudaGetLastError(), "embedding forward");
}

void embedding_backward_cuda(const EmbeddingBackward& args, void* stream) {
  with_cuda_type(args.dtype, [&](auto type) {
    if (args.target_dtype == DType::kFloat64) {
      backward<decltype(type), double>(args, as_stream(stream));
    } else {
      backward<decltype(type), float>(args, as_stream(stream));
    }
  });
  check_cuda(cudaGetLastError(), "embedding backward");
}

}  // namespace megatron
