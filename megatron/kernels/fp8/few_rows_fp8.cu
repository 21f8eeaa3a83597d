// Note [Products of few rows with FP8 codes]
// As in few_rows_product.cu a block reads the matrix once, and the first loads are under way before
// the kernel ahead has ended. Half the bytes leave half the time for arithmetic, so that tensor
// cores multiply: codes become fp16, which holds them exactly, and rows of x, scaled by a power of
// two, too (but for elements below 2^-28 of the largest). A block takes 8 rows of the matrix at a
// time, and its warps every eighth chunk of their elements; the order of elements within a chunk,
// which is that of the loads, does not matter to a sum. Sums are fp32.
#include <algorithm>

#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/few_rows_input.cuh"
#include "megatron/kernels/fp8/few_rows_fp8.h"

namespace megatron {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreadsOfBlock = kLanes * kWarps, kResident = 2;
constexpr int kTile = 8;    // rows of the matrix
constexpr int kChunk = 64;  // elements of a row that a warp multiplies at a time, 16 of a thread
constexpr int kPacks = 8;   // chunks of a warp in flight
constexpr int kPad = 8;     // elements between rows of x, which lie in other banks then

// Where a block is in its share of the matrix; of pairs of rows (SwiGLU) the gate's runs come
// first.
struct Run {
  int64_t tile;
  int run;
};

__device__ __forceinline__ void multiply_chunk(float (&sums)[4], uint32_t low_x, uint32_t high_x,
                                               uint32_t low_w, uint32_t high_w) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(low_x), "r"(0), "r"(high_x), "r"(0), "r"(low_w), "r"(high_w));
}

// Four codes as two pairs of fp16.
__device__ __forceinline__ void decode(uint32_t codes, uint32_t& low, uint32_t& high) {
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}

// Rows of T become fp16 in place, times a power of two; `inverse`: what undoes that.
template <class T, int Rows>
__device__ void scale_rows(T* x, int inner, int stride, float (&inverse)[Rows]) {
  __shared__ float largest[kWarps][Rows];
  const int first = static_cast<int>(threadIdx.x), packs = inner / 8;
  const auto row = [&](int r) { return reinterpret_cast<uint4*>(x + r * stride); };
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float most = 0.0f;
    for (int i = first; i < packs; i += kThreadsOfBlock) {
      float own[8];
      unpack<T>(row(r)[i], own);
#pragma unroll
      for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(own[j]));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (first % kLanes == 0) largest[first / kLanes][r] = most;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w][r]);
    // The largest becomes [2^13, 2^14), unless it is zero or infinite.
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
    const int up = most == 0.0f || exponent > 127 ? 0 : min(13 - exponent, 126);
    const float scale = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
    inverse[r] = 1.0f / scale;
    for (int i = first; i < packs; i += kThreadsOfBlock) {
      float own[8];
      unpack<T>(row(r)[i], own);
#pragma unroll
      for (int j = 0; j < 8; ++j) own[j] *= scale;
      row(r)[i] = pack_words<__half>(own);
    }
  }
  __syncthreads();
}

template <class T, int Rows, bool Swiglu, bool Blocks>
__global__ void __launch_bounds__(kThreadsOfBlock, kResident)
    few_rows_fp8_kernel(const __grid_constant__ FewRowsProduct a, int runs) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ float parts[2][Swiglu ? 2 : 1][kWarps][Rows][kTile];
  T* const x = reinterpret_cast<T*>(raw);  // [Rows, inner + kPad], then of fp16
  const int lane = static_cast<int>(threadIdx.x) % kLanes,
            warp = static_cast<int>(threadIdx.x) / kLanes;
  const int group = lane / 4, quarter = lane % 4;
  const int inner = static_cast<int>(a.inner), stride = inner + kPad;
  const int all_runs = Swiglu ? 2 * runs : runs;
  const int64_t tiles = a.columns / kTile;
  const auto place_in_row = [&](int run, int pack) {
    return ((run * kPacks + pack) * kWarps + warp) * kChunk;
  };
  Run next{blockIdx.x, 0};
  struct Codes {
    uint4 at[kPacks];
    float scales[Blocks ? kPacks : 1];
  };
  const auto load = [&](Codes& to) {
    const bool up = Swiglu && next.run >= runs;
    const int64_t row = next.tile * kTile + group + (up ? a.columns : 0);
    const auto* codes = static_cast<const uint8_t*>(a.w) + row * a.inner;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int chunk = place_in_row(next.run - (up ? runs : 0), i), at = chunk + quarter * 16;
      const bool there = next.tile < tiles && chunk < inner;
      to.at[i] = there && at < inner ? load_streamed(codes + at) : uint4{};
      // One for all rows of a tile
      if constexpr (Blocks)
        to.scales[i] = there ? __ldg(a.w_scale + row / 128 * a.w_scale_stride + chunk / 128) : 0.0f;
    }
    if (++next.run == all_runs) next = {next.tile + gridDim.x, 0};
  };
  Codes ring[2];
  Run here = next;
  load(ring[0]);
  const FirstGains<kThreadsOfBlock> gains(a);

  wait_for_kernel_ahead();
  let_next_kernel_begin();
  if (a.gain == nullptr) {
    read_rows<T, Rows>(a, x, stride);
  } else {
    read_normed_rows<T, Rows>(a, gains, x, stride);
  }
  float inverse[Rows];
  scale_rows<T, Rows>(x, inner, stride, inverse);

  float sums[4] = {}, gates[4] = {};
  int turn = 0;
  const auto finish = [&] {
    if (group < Rows) {
      const auto put = [&](int which, const float (&of)[4]) {
        parts[turn][which][warp][group < Rows ? group : 0][2 * quarter] = of[0];
        parts[turn][which][warp][group < Rows ? group : 0][2 * quarter + 1] = of[1];
      };
      put(0, sums);
      if constexpr (Swiglu) put(1, gates);
    }
    __syncthreads();
    const int i = static_cast<int>(threadIdx.x), r = i / kTile, n = i % kTile;
    if (r < Rows) {
      float by = Blocks ? 1.0f : __ldg(a.w_scale);
#pragma unroll
      for (int k = 0; k < Rows; ++k)
        if (k == r) by *= inverse[k];
      const auto total = [&](int which) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += parts[turn][which][w][r][n];
        return sum * by;
      };
      store_product<T, Swiglu>(a, r, here.tile * kTile + n, total(0),
                               Swiglu ? total(Swiglu ? 1 : 0) : 0.0f);
    }
    turn ^= 1;
  };
  const auto multiply = [&](const Codes& codes) {
    const bool up = Swiglu && here.run >= runs;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int chunk = place_in_row(here.run - (up ? runs : 0), i), at = chunk + quarter * 16;
      if (chunk >= inner) break;
      uint4 rows[2] = {};
      if (group < Rows && at < inner) {
        const auto* from = reinterpret_cast<const uint4*>(x + group * stride + at);
        rows[0] = from[0];
        rows[1] = from[1];
      }
      const uint32_t words[4] = {codes.at[i].x, codes.at[i].y, codes.at[i].z, codes.at[i].w};
      const uint32_t own[8] = {rows[0].x, rows[0].y, rows[0].z, rows[0].w,
                               rows[1].x, rows[1].y, rows[1].z, rows[1].w};
      float chunk_sums[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t low, high;
        decode(words[j], low, high);
        multiply_chunk(Blocks ? chunk_sums : sums, own[2 * j], own[2 * j + 1], low, high);
      }
      if constexpr (Blocks) {
        sums[0] += chunk_sums[0] * codes.scales[i];
        sums[1] += chunk_sums[1] * codes.scales[i];
      }
    }
    ++here.run;
    if (here.run == runs && here.run < all_runs) {  // of a gate
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gates[j] = sums[j];
        sums[j] = 0.0f;
      }
      return;
    }
    if (here.run < all_runs) return;
    finish();
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] = 0.0f;
    here = {here.tile + gridDim.x, 0};
  };
  while (here.tile < tiles) {
    load(ring[1]);
    multiply(ring[0]);
    if (here.tile >= tiles) break;
    load(ring[0]);
    multiply(ring[1]);
  }
}

template <int Rows>
size_t input_bytes(const FewRowsProduct& args) {
  return static_cast<size_t>(Rows * (args.inner + kPad)) * 2;
}

template <class T, int Rows, bool Swiglu, bool Blocks>
void start(const FewRowsProduct& args, void* stream) {
  const auto kernel = few_rows_fp8_kernel<T, Rows, Swiglu, Blocks>;
  const size_t bytes = input_bytes<Rows>(args);
  MEGATRON_ASSERT(allow_shared_memory(kernel, bytes), "rows of ", args.inner, " elements");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(std::min<int64_t>(132 * kResident, args.columns / kTile)));
  config.blockDim = dim3(kThreadsOfBlock);
  config.dynamicSmemBytes = bytes;
  config.stream = as_stream(stream);
  cudaLaunchAttribute early = early_start();
  config.attrs = &early;
  config.numAttrs = args.weights_at_rest ? 1 : 0;
  constexpr int kOfRun = kPacks * kWarps * kChunk;
  const int runs = static_cast<int>((args.inner + kOfRun - 1) / kOfRun);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args, runs), "a product of few rows with FP8");
}

template <class T, int Rows>
void start_kind(const FewRowsProduct& args, void* stream) {
  const bool blocks = args.w_scale_stride > 0;
  if (args.swiglu)
    return blocks ? start<T, Rows, true, true>(args, stream)
                  : start<T, Rows, true, false>(args, stream);
  blocks ? start<T, Rows, false, true>(args, stream) : start<T, Rows, false, false>(args, stream);
}

}  // namespace

bool has_few_rows_fp8_product(const FewRowsProduct& args) {
  return args.columns % kTile == 0 && args.inner % 16 == 0;
}

void few_rows_fp8_product_cuda(const FewRowsProduct& args, void* stream) {
  with_type_and_rows(args, [&](auto type, auto rows) {
    start_kind<decltype(type), decltype(rows)::value>(args, stream);
  });
}

}  // namespace megatron
