// Note [Products of few rows on a GPU]
// The product of a token reads a matrix once and does little else, so it takes as long as the
// memory takes. Each warp reads whole rows of the weights, one after another, with the next kPacks
// loads of each thread in flight while it sums the ones before; those of weights at rest are under
// way before the kernel ahead, which computes `x`, has ended. A norm of `x` is computed by every
// block for itself, which takes less time than a kernel does.
#include <algorithm>

#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/few_rows_input.cuh"
#include "megatron/kernels/few_rows_product.h"
#include "megatron/kernels/fp8/few_rows_fp8.h"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 4, kResident = 4, kPacks = 8;
constexpr int kChunk = kLanes * kPacks * 8;  // elements of a row that a warp has in flight

// Where a warp is in its share of the weights: columns from its own number on, all warps apart; of
// a pair of columns (SwiGLU) the chunks of the gate come first.
struct Place {
  int64_t column;
  int chunk;
};

template <class T, int Rows, bool Swiglu>
__global__ void __launch_bounds__(kLanes* kWarps, kResident)
    few_rows_kernel(FewRowsProduct a, int chunks) {
  extern __shared__ __align__(16) unsigned char raw[];
  T* x = reinterpret_cast<T*>(raw);  // [Rows, inner]
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int inner = static_cast<int>(a.inner), all_chunks = Swiglu ? 2 * chunks : chunks;
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  Place next{int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes, 0};
  const auto load = [&](uint4(&to)[kPacks]) {
    const bool up = Swiglu && next.chunk >= chunks;
    const T* row = static_cast<const T*>(a.w) + (next.column + (up ? a.columns : 0)) * a.inner;
    const int begin = (next.chunk - (up ? chunks : 0)) * kChunk;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = begin + (i * kLanes + lane) * 8;
      if (next.column < a.columns && at < inner) to[i] = load_streamed(row + at);
    }
    if (++next.chunk == all_chunks) next = {next.column + warps, 0};
  };
  uint4 ring[2][kPacks];
  Place here = next;
  load(ring[0]);
  // A norm takes as long as the memory needs for both halves of the ring.
  const bool both = a.gain != nullptr;
  if (both) load(ring[1]);
  const FirstGains<kLanes * kWarps> gains(a);

  wait_for_kernel_ahead();
  let_next_kernel_begin();
  if (a.gain == nullptr) {
    read_rows<T, Rows>(a, x, inner);
  } else {
    read_normed_rows<T, Rows>(a, gains, x, inner);
  }
  __syncthreads();

  float sums[Rows] = {}, gates[Rows] = {};
  const auto multiply = [&](const uint4(&packs)[kPacks]) {
    const bool up = Swiglu && here.chunk >= chunks;
    const int begin = (here.chunk - (up ? chunks : 0)) * kChunk;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int at = begin + (i * kLanes + lane) * 8;
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
    ++here.chunk;
    if (here.chunk != chunks && here.chunk < all_chunks) return;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2)
        sums[r] += __shfl_xor_sync(~0u, sums[r], step);
    }
    if (here.chunk < all_chunks) {  // of a gate
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        gates[r] = sums[r];
        sums[r] = 0.0f;
      }
      return;
    }
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) store_product<T, Swiglu>(a, r, here.column, sums[r], gates[r]);
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) sums[r] = 0.0f;
    here = {here.column + warps, 0};
  };
  if (!both) load(ring[1]);
  while (here.column < a.columns) {
    multiply(ring[0]);
    if (here.column >= a.columns) break;
    load(ring[0]);
    multiply(ring[1]);
    load(ring[1]);
  }
}

template <class T, int Rows>
void start(const FewRowsProduct& args, void* stream) {
  const auto kernel =
      args.swiglu ? few_rows_kernel<T, Rows, true> : few_rows_kernel<T, Rows, false>;
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
  if (args.w_scale != nullptr && !has_few_rows_fp8_product(args)) return false;
  return is_hopper() && (args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16) &&
         args.rows >= 1 && args.rows <= kMostRowsOnGpu && args.inner % 8 == 0 &&
         args.rows * args.inner * 2 <= kMostBytes && is_aligned(args.x) && is_aligned(args.w) &&
         is_aligned(args.gain) &&
         !(args.swiglu && (args.bias != nullptr || args.addend != nullptr));
}

void few_rows_product_cuda(const FewRowsProduct& args, void* stream) {
  if (args.w_scale != nullptr) return few_rows_fp8_product_cuda(args, stream);
  with_type_and_rows(args, [&](auto type, auto rows) {
    start<decltype(type), decltype(rows)::value>(args, stream);
  });
}

}  // namespace megatron
