// Note [Products of some rows with SwiGLU]
// A block has the tile of all rows by kColumns columns of the gate and the same ones of the other
// half: their weights lie beneath each other in shared memory, where they are one operand of wgmma,
// so that a thread ends with the sums of both and writes SwiGLU of them. One thread copies weights
// and rows of 64 k at a time into a ring of stages; those of weights at rest are under way before
// the kernel ahead, which computes `x`, has ended. The time is that of reading the weights.
#include <algorithm>

#include "megatron/kernels/detail/activation_math.h"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/sm90.cuh"
#include "megatron/kernels/products/gated_product.h"

namespace megatron {
namespace {

using namespace sm90;

constexpr int kGroupRows = 64, kGroupThreads = 128;  // of a warpgroup's product
// Up to so many rows cuBLAS and a kernel of SwiGLU take as long.
constexpr int64_t kLeastRows = 33;
constexpr int64_t kMultiprocessors = 132;
// Of the multiprocessors' columns in use; with fewer cuBLAS' tiles are the better ones.
constexpr double kLeastFill = 0.85;

template <int kColumns, int kGroups>
struct Stages {
  static constexpr int kWeights = 2 * kColumns * kPanelRowBytes;
  static constexpr int kBytes = kWeights + kGroups * kGroupRows * kPanelRowBytes;
  static constexpr int kAlignment = 1024, kBarriers = 256;
  static constexpr int kRoom = (227 << 10) - kAlignment - kBarriers;
  static constexpr int kCount = std::min(8, kRoom / kBytes);
  static constexpr int kShared = kCount * kBytes + kAlignment + kBarriers;
};

// Where the stages lie, and their barriers: that a stage is full, and that it was read.
template <class S>
struct Ring {
  uint32_t base;

  __device__ uint32_t weights(int i) const { return base + i % S::kCount * S::kBytes; }
  __device__ uint32_t rows(int i) const { return weights(i) + S::kWeights; }
  __device__ uint32_t full(int i) const {
    return base + S::kCount * S::kBytes + i % S::kCount * uint32_t{8};
  }
  __device__ uint32_t free(int i) const { return full(i) + S::kCount * 8; }
  __device__ static uint32_t parity(int i) { return static_cast<uint32_t>(i / S::kCount & 1); }
};

template <int kColumns, class S>
__device__ void copy_all(const Ring<S>& ring, const CUtensorMap& w, const CUtensorMap& x,
                         int columns, int first, int count) {
  const auto copy_weights = [&](int i) {
    barrier_expect(ring.full(i), S::kBytes);
    for (int half = 0; half < 2; ++half)
      load_panel(ring.weights(i) + half * kColumns * kPanelRowBytes, &w, ring.full(i),
                 i * kPanelColumns, 0, half * columns + first);
  };
  const auto copy_rows = [&](int i) {
    load_panel(ring.rows(i), &x, ring.full(i), i * kPanelColumns, 0, 0);
  };
  const int ahead = min(S::kCount, count);
  for (int i = 0; i < ahead; ++i) copy_weights(i);
  wait_for_kernel_ahead();
  for (int i = 0; i < ahead; ++i) copy_rows(i);
  for (int i = ahead; i < count; ++i) {
    barrier_wait(ring.free(i), ring.parity(i - S::kCount));
    copy_weights(i);
    copy_rows(i);
  }
}

// Of bf16 products.
__device__ __forceinline__ float swiglu(float gate, float value) {
  gate = low_of(pack2(gate, 0.0f));
  return SiluGate::at(gate).act * low_of(pack2(value, 0.0f));
}

template <int kColumns, int kGroups>
__global__ void __launch_bounds__(kGroups* kGroupThreads + 32, 1)
    gated_kernel(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,
                 __nv_bfloat16* out, int rows, int columns, int inner) {
  using S = Stages<kColumns, kGroups>;
  extern __shared__ unsigned char raw[];
  const Ring<S> ring{(shared_address(raw) + S::kAlignment - 1) / S::kAlignment * S::kAlignment};
  const int thread = static_cast<int>(threadIdx.x), group = thread / kGroupThreads;
  const int first = static_cast<int>(blockIdx.x) * kColumns;
  const int count = (inner + kPanelColumns - 1) / kPanelColumns;
  if (thread == 0) {
    for (int i = 0; i < S::kCount; ++i) {
      barrier_init(ring.full(i), 1);
      barrier_init(ring.free(i), kGroups);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (group == kGroups) {
    if (thread == kGroups * kGroupThreads) copy_all<kColumns>(ring, w, x, columns, first, count);
    return;
  }
  float sums[kColumns];  // half of them of the gate
  for (int i = 0; i < count; ++i) {
    barrier_wait(ring.full(i), ring.parity(i));
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kPanelRowBytes; k += 32)
      wgmma<0, 0>(sums, k_major(ring.rows(i) + group * kGroupRows * kPanelRowBytes + k),
                  k_major(ring.weights(i) + k), i > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && thread % kGroupThreads == 0) barrier_arrive(ring.free(i - 1));
  }
  wgmma_wait<0>();
  wgmma_pin(sums);
  const int lane = thread % 32, warp = thread % kGroupThreads / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group * kGroupRows + warp * 16 + half * 8 + lane / 4;
    if (row >= rows) continue;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = first + j * 8 + lane % 4 * 2, gate = j * 4 + half * 2,
                value = gate + kColumns / 2;
      if (column >= columns) continue;
      const uint32_t both =
          pack2(swiglu(sums[gate], sums[value]), swiglu(sums[gate + 1], sums[value + 1]));
      *reinterpret_cast<uint32_t*>(out + int64_t{row} * columns + column) = both;
    }
  }
}

template <int kColumns, int kGroups>
void start(const GatedProduct& a, void* stream) {
  using S = Stages<kColumns, kGroups>;
  const auto kernel = gated_kernel<kColumns, kGroups>;
  MEGATRON_ASSERT(allow_shared_memory(kernel, S::kShared), S::kShared, " bytes of shared memory");
  const CUtensorMap w = panel_map(a.w, a.inner, 1, 2 * a.columns, a.inner, a.inner, kColumns);
  const CUtensorMap x = panel_map(a.x, a.inner, 1, a.rows, a.inner, a.inner, kGroups * kGroupRows);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((a.columns + kColumns - 1) / kColumns));
  config.blockDim = dim3(kGroups * kGroupThreads + 32);
  config.dynamicSmemBytes = S::kShared;
  config.stream = as_stream(stream);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = a.weights_at_rest ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, w, x, static_cast<__nv_bfloat16*>(a.out),
                                static_cast<int>(a.rows), static_cast<int>(a.columns),
                                static_cast<int>(a.inner)),
             "a product with SwiGLU");
}

// The narrowest tiles that all run at once; 0: none fills the multiprocessors.
int tile_columns(int64_t columns) {
  for (const int tile : {64, 96, 112, 128}) {
    if (columns > tile * kMultiprocessors) continue;
    const auto fill = static_cast<double>(columns) / static_cast<double>(tile * kMultiprocessors);
    return fill >= kLeastFill ? tile : 0;
  }
  return 0;
}

template <int kColumns>
void start_groups(const GatedProduct& args, void* stream) {
  static_assert(kMostGatedRows == 2 * kGroupRows);
  args.rows > kGroupRows ? start<kColumns, 2>(args, stream) : start<kColumns, 1>(args, stream);
}

}  // namespace

bool has_gated_product(const GatedProduct& args) {
  return is_hopper() && args.rows >= kLeastRows && args.rows <= kMostGatedRows &&
         args.inner % 8 == 0 && args.columns % 8 == 0 && tile_columns(args.columns) > 0;
}

void gated_product_cuda(const GatedProduct& args, void* stream) {
  switch (tile_columns(args.columns)) {
    case 64:
      return start_groups<64>(args, stream);
    case 96:
      return start_groups<96>(args, stream);
    case 112:
      return start_groups<112>(args, stream);
    default:
      return start_groups<128>(args, stream);
  }
}

}  // namespace megatron
