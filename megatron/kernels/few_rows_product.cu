// Note [Products of few rows on a GPU]
// The product of a token reads a matrix once and does little else, so it takes as long as the
// memory takes. Each warp reads whole rows of the weights, one after another, with the next kPacks
// loads of each thread in flight while it sums the ones before; those of weights at rest are under
// way before the kernel ahead, which computes `x`, has ended.
#include <algorithm>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/few_rows_product.h"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 4, kResident = 4, kPacks = 8;
constexpr int kChunk = kLanes * kPacks * 8;  // elements of a row that a warp has in flight

__device__ __forceinline__ uint4 load_streamed(const void* from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(from));
  return words;
}

// Where a warp is in its share of the weights: rows from its own number on, all warps apart.
struct Place {
  int64_t column;
  int chunk;
};

template <class T, int Rows>
__global__ void __launch_bounds__(kLanes* kWarps, kResident)
    few_rows_kernel(FewRowsProduct a, int chunks) {
  extern __shared__ __align__(16) unsigned char raw[];
  T* x = reinterpret_cast<T*>(raw);  // [Rows, inner]
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int inner = static_cast<int>(a.inner);
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  Place next{int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes, 0};
  const auto load = [&](uint4(&to)[kPacks]) {
    const T* row = static_cast<const T*>(a.w) + next.column * a.inner;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = next.chunk * kChunk + (i * kLanes + lane) * 8;
      if (next.column < a.columns && at < inner) to[i] = load_streamed(row + at);
    }
    if (++next.chunk == chunks) next = {next.column + warps, 0};
  };
  uint4 ring[2][kPacks];
  Place here = next;
  load(ring[0]);

  wait_for_kernel_ahead();
  let_next_kernel_begin();
  for (int i = static_cast<int>(threadIdx.x); i < Rows * inner / 8; i += kLanes * kWarps)
    reinterpret_cast<uint4*>(x)[i] = __ldcg(static_cast<const uint4*>(a.x) + i);
  __syncthreads();

  float sums[Rows] = {};
  const auto multiply = [&](const uint4(&packs)[kPacks]) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = here.chunk * kChunk + (i * kLanes + lane) * 8;
      if (at >= inner) break;
      float w[8];
      unpack<T>(packs[i], w);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        float own[8];
        unpack<T>(*reinterpret_cast<const uint4*>(x + r * inner + at), own);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[r] += w[j] * own[j];
      }
    }
    if (++here.chunk < chunks) return;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2)
        sums[r] += __shfl_xor_sync(~0u, sums[r], step);
    }
    if (lane == 0) {
      const float bias =
          a.bias == nullptr ? 0.0f : load_as<float>(static_cast<const T*>(a.bias)[here.column]);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const int64_t at = r * a.columns + here.column;
        // Not from the L1 cache, which a kernel that begins early may find filled before the write
        const float more = a.addend == nullptr
                               ? 0.0f
                               : load_as<float>(__ldcg(static_cast<const T*>(a.addend) + at));
        store_as(static_cast<T*>(a.out)[at], sums[r] + bias + more);
      }
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) sums[r] = 0.0f;
    here = {here.column + warps, 0};
  };
  while (here.column < a.columns) {
    load(ring[1]);
    multiply(ring[0]);
    if (here.column >= a.columns) break;
    load(ring[0]);
    multiply(ring[1]);
  }
}

template <class T, int Rows>
void start(const FewRowsProduct& args, void* stream) {
  const auto kernel = few_rows_kernel<T, Rows>;
  const size_t bytes = static_cast<size_t>(Rows * args.inner) * sizeof(T);
  MEGATRON_ASSERT(allow_shared_memory(kernel, bytes), "rows of ", args.inner, " elements");
  cudaLaunchConfig_t config{};
  const int64_t blocks = std::min<int64_t>(132 * kResident, (args.columns + kWarps - 1) / kWarps);
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kLanes * kWarps);
  config.dynamicSmemBytes = bytes;
  config.stream = as_stream(stream);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = args.weights_at_rest ? 1 : 0;
  const int chunks = static_cast<int>((args.inner + kChunk - 1) / kChunk);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, chunks), "a product of few rows");
}

}  // namespace

bool has_few_rows_product(const FewRowsProduct& args) {
  constexpr int64_t kMostBytes = 56 << 10;  // of `x`, in each of kResident blocks
  const auto is_aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return is_hopper() && (args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16) &&
         args.rows >= 1 && args.rows <= kMostRowsOnGpu && args.inner % 8 == 0 &&
         args.rows * args.inner * 2 <= kMostBytes && is_aligned(args.x) && is_aligned(args.w);
}

void few_rows_product_cuda(const FewRowsProduct& args, void* stream) {
  const auto with_rows = [&](auto type) {
    using T = decltype(type);
    switch (args.rows) {
      case 1:
        return start<T, 1>(args, stream);
      case 2:
        return start<T, 2>(args, stream);
      case 3:
        return start<T, 3>(args, stream);
      default:
        return start<T, 4>(args, stream);
    }
  };
  if (args.dtype == DType::kBFloat16) {
    with_rows(__nv_bfloat16{});
  } else {
    with_rows(__half{});
  }
}

}  // namespace megatron
