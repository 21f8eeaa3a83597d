#include <algorithm>

#include "megatron/kernels/detail/async_copy.cuh"
#include "megatron/kernels/detail/fp8_tile.cuh"
#include "megatron/kernels/detail/norm_rows.cuh"
#include "megatron/kernels/fp8_norm.h"

namespace megatron {
namespace {

constexpr unsigned kMostThreads = 512;
constexpr int kRing = 8;  // rows of a block that are under way or at hand: few blocks fit
constexpr unsigned kRun = static_cast<unsigned>(kFp8NormRows);

// Runs blockIdx.x, blockIdx.x + gridDim.x, ... of kRun rows, one row after the other (Note [Rings
// of loads]). A thread holds the packs threadIdx.x, threadIdx.x + blockDim.x, ... of a row; the
// codes of its columns wait in registers until there are 16 bytes of each to write.
template <class T, class W, bool LayerNorm, Fp8Type Type, int Packs>
__global__ void __launch_bounds__(kMostThreads) fp8_norm_kernel(Fp8Norm args) {
  constexpr int kSize = Pack<T>::kSize, kWords = kSize / 4;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ float shared[2][32][1], for_amax[33];
  const NormForward& norm = args.norm;
  uint4* const mine = reinterpret_cast<uint4*>(ring) + threadIdx.x;
  const int threads = static_cast<int>(blockDim.x), n = static_cast<int>(norm.columns);
  const int first = static_cast<int>(threadIdx.x) * kSize, stride = threads * kSize;
  const auto row_of = [&](unsigned i) {
    return (blockIdx.x + int64_t{i / kRun} * gridDim.x) * kRun + i % kRun;
  };
  const auto pack_of = [&](unsigned i, int p) {
    return mine + (static_cast<int>(i % kRing) * Packs + p) * threads;
  };
  const auto start = [&](unsigned i) {
    const int64_t row = row_of(i);
    if (row < norm.rows) {
#pragma unroll
      for (int p = 0; p < Packs; ++p) {
        if (first + p * stride < n)
          copy_async(pack_of(i, p), static_cast<const T*>(norm.x) + row * n + first + p * stride);
      }
    }
    end_copy_group();
  };
#pragma unroll
  for (unsigned i = 0; i < kRing - 1; ++i) start(i);
  const float given = *args.given_scale, scale = given == 0.0f ? 1.0f : given;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.scale[0] = scale;
    args.scale[kFp8InverseAt] = 1.0f / scale;
  }
  float gain[Packs][kSize] = {}, amax = 0.0f;
#pragma unroll
  for (int p = 0; p < Packs; ++p) {
    if (first + p * stride < n) load_gain<W>(norm, first + p * stride, gain[p]);
  }
  uint32_t recent[Packs][kWords][4] = {};  // codes of the last 4 rows, 4 neighbours a word
  uint32_t turned[Packs][kSize][4] = {};   // of the last 16 rows, 4 rows a word
  int turn = 0;
  for (unsigned i = 0; row_of(i) < norm.rows; ++i) {
    const int64_t row = row_of(i);
    start(i + kRing - 1);  // where the last row was
    wait_for_copies<kRing - 1>();
    uint4 words[Packs];
#pragma unroll
    for (int p = 0; p < Packs; ++p)
      words[p] = first + p * stride < n ? *pack_of(i, p) : uint4{};  // zeros beyond the row
    float mean = 0.0f;
    if constexpr (LayerNorm) {
      float sum[1] = {};
#pragma unroll
      for (int p = 0; p < Packs; ++p) {
        float x[kSize];
        unpack<T>(words[p], x);
#pragma unroll
        for (int j = 0; j < kSize; ++j) sum[0] += x[j];
      }
      sum_block(sum, shared, turn);
      turn ^= 1;
      mean = sum[0] / static_cast<float>(n);
    }
    float square[1] = {};
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (first + p * stride >= n) break;
      float x[kSize];
      unpack<T>(words[p], x);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float centered = x[j] - mean;
        square[0] += centered * centered;
      }
    }
    sum_block(square, shared, turn);
    turn ^= 1;
    const float rstd =
        1.0f / sqrt(square[0] / static_cast<float>(n) + static_cast<float>(norm.eps));
    if (threadIdx.x == 0) {
      if constexpr (LayerNorm) static_cast<float*>(norm.mean)[row] = mean;
      static_cast<float*>(norm.rstd)[row] = rstd;
    }
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      const int column = first + p * stride;
      if (column >= n) break;
      float x[kSize], bias[kSize] = {};
      unpack<T>(words[p], x);
      const bool biased = LayerNorm && norm.bias != nullptr;
      if (biased) load_weights<W>(norm.bias, column, bias);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float scaled = (x[j] - mean) * rstd * gain[p][j];
        x[j] = biased ? scaled + bias[j] : scaled;
      }
      unpack<T>(pack_words<T>(x), x);  // rounded as the tensor would be
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        amax = larger(amax, x[j]);
        x[j] *= scale;
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t(&last)[4] = recent[p][w];
        last[0] = last[1];
        last[1] = last[2];
        last[2] = last[3];
        last[3] = codes_of<Type>(x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]);
      }
      uint8_t* to = args.in_rows + row * n + column;
      if constexpr (kWords == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(recent[p][0][3], recent[p][1][3]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = recent[p][0][3];
      }
    }
    if (args.in_columns == nullptr || i % 4 != 3) continue;
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t(&last)[4] = recent[p][w];
        uint32_t columns[4];
        turn_bytes(last[0], last[1], last[2], last[3], columns);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          uint32_t(&whole)[4] = turned[p][4 * w + c];
          whole[0] = whole[1];
          whole[1] = whole[2];
          whole[2] = whole[3];
          whole[3] = columns[c];
        }
      }
    }
    if (i % kRun != kRun - 1) continue;
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      const int column = first + p * stride;
      if (column >= n) break;
#pragma unroll
      for (int c = 0; c < kSize; ++c) {
        const uint32_t(&whole)[4] = turned[p][c];
        *reinterpret_cast<uint4*>(args.in_columns + int64_t{column + c} * norm.rows + row -
                                  (kRun - 1)) = make_uint4(whole[0], whole[1], whole[2], whole[3]);
      }
    }
  }
  if (args.new_amax != nullptr) raise_amax(args.new_amax, amax, for_amax);
}

// Blocks that stay on the device, each for the same number of `runs` but for some with one less.
template <class Kernel>
unsigned staying_blocks(Kernel* kernel, unsigned threads, size_t bytes, int64_t runs) {
  int device = 0, processors = 0, resident = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel,
                                                           static_cast<int>(threads), bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t slots = std::max(1, resident * processors), rounds = (runs + slots - 1) / slots;
  return static_cast<unsigned>((runs + rounds - 1) / rounds);
}

template <class T, class W, bool LayerNorm, Fp8Type Type, int Packs>
void launch(const Fp8Norm& args, cudaStream_t stream) {
  const auto kernel = fp8_norm_kernel<T, W, LayerNorm, Type, Packs>;
  const int64_t packs = args.norm.columns / Pack<T>::kSize;
  const auto threads = static_cast<unsigned>(((packs + Packs - 1) / Packs + 31) / 32 * 32);
  const size_t bytes = size_t{16} * threads * Packs * kRing;  // at most 128 KiB
  MEGATRON_ASSERT(allow_shared_memory(kernel, bytes), "FP8 norm: no shared memory of ", bytes,
                  " bytes");
  kernel<<<staying_blocks(kernel, threads, bytes, args.norm.rows / kRun), threads, bytes, stream>>>(
      args);
}

template <class T, bool LayerNorm, Fp8Type Type>
void launch_row(const Fp8Norm& args, cudaStream_t stream) {
  with_weight_type<T>(args.norm, [&](auto weight) {
    using W = decltype(weight);
    if (args.norm.columns <= int64_t{kMostThreads} * Pack<T>::kSize) {
      launch<T, W, LayerNorm, Type, 1>(args, stream);
    } else {
      launch<T, W, LayerNorm, Type, 2>(args, stream);
    }
  });
}

}  // namespace

void fp8_norm_cuda(const Fp8Norm& args, void* stream) {
  const NormForward& norm = args.norm;
  MEGATRON_ASSERT(norm.rows % kFp8NormRows == 0 && norm.columns % kFp8NormRows == 0 &&
                      norm.columns * size_of(norm.dtype) <= kFp8NormRowBytes &&
                      is_aligned({norm.x, norm.gain, norm.bias, args.in_rows, args.in_columns}),
                  "FP8 norm of [", norm.rows, ", ", norm.columns,
                  "]: expected multiples of 16, 16-byte aligned, rows of at most ",
                  kFp8NormRowBytes, " bytes");
  MEGATRON_ASSERT(!norm.saved_statistics && (norm.layer_norm || norm.bias == nullptr),
                  "FP8 norm from saved statistics, or RMSNorm with a bias");
  if (norm.rows == 0) return;
  with_cast_type(norm.dtype, [&](auto x) {
    with_fp8_type(args.type, [&](auto type) {
      using T = decltype(x);
      norm.layer_norm ? launch_row<T, true, type()>(args, as_stream(stream))
                      : launch_row<T, false, type()>(args, as_stream(stream));
    });
  });
  check_cuda(cudaGetLastError(), "FP8 norm");
}

}  // namespace megatron
