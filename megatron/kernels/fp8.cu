#include <cuda_fp8.h>

#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/fp8_math.h"
#include "megatron/kernels/fp8.h"

// Note [Transposing codes]
// A thread holds 4 rows x 8 columns of x. The codes of 4 rows at one column make a word; words go
// to shared memory as [column][group of 4 rows], with groups exclusive-ored by the column so that a
// warp writes to 32 banks and reads 16 bytes (16 rows of a column) a lane without conflicts. A warp
// then writes 128 contiguous bytes of each of 4 transposed rows.
namespace megatron {
namespace {

constexpr int kThreadRows = 4, kThreadColumns = 8;

template <Fp8Type Type>
__device__ __forceinline__ uint32_t codes_of(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t kKind = Type == Fp8Type::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kKind);
  return low | high << 16;
}

// 8 neighbours of an aligned row.
template <class T>
struct Eight {
  static constexpr int kPacks = kThreadColumns / Pack<T>::kSize;
  Pack<T> packs[kPacks];
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) packs[i] = load_group<Pack<T>>(from + i * Pack<T>::kSize);
  }
  __device__ __forceinline__ float at(int i) const {
    return load_as<float>(packs[i / Pack<T>::kSize].at[i % Pack<T>::kSize]);
  }
};

// Bytes of four words turned: out[i] holds byte i of each of a, b, c, d.
__device__ __forceinline__ void turn_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                           uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
  const uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

template <class T>
__global__ void amax_kernel(Amax args) {
  __shared__ float shared[33];
  constexpr int kSize = Pack<T>::kSize, kUnroll = 4;
  const T* x = static_cast<const T*>(args.x);
  const int64_t packs = args.count / kSize, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  float amax = 0.0f;
  for (int64_t i = first; i < packs; i += kUnroll * step) {
    Pack<T> in[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (i + u * step < packs) in[u] = load_group<Pack<T>>(x + (i + u * step) * kSize);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) amax = larger(amax, load_as<float>(in[u].at[j]));
    }
  }
  const int64_t tail = packs * kSize + first;
  if (tail < args.count) amax = larger(amax, load_as<float>(x[tail]));
  raise_amax(args.amax, amax, shared);
}

// A block per tile of 128 rows and 64 columns.
constexpr int kTileRows = 128, kTileColumns = 64;

template <class T, Fp8Type Type>
__global__ void __launch_bounds__(256) cast_kernel(Fp8Cast args) {
  __shared__ __align__(16) uint32_t turned[kTileColumns * kTileRows / 4];
  __shared__ float shared[33];
  const int64_t across = (args.columns + kTileColumns - 1) / kTileColumns;
  const int64_t tile_row = blockIdx.x / across * kTileRows,
                tile_column = blockIdx.x % across * kTileColumns;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int column_group = lane % 8, row_group = 4 * warp + lane / 8;
  const int64_t row = tile_row + kThreadRows * row_group,
                column = tile_column + kThreadColumns * column_group;
  const bool inside = row < args.rows && column < args.columns;
  Eight<T> in[kThreadRows] = {};
  if (inside) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      in[r].load(static_cast<const T*>(args.x) + (row + r) * args.columns + column);
  }
  float scale = args.amax != nullptr ? fp8_scale(*args.amax, largest_of(Type)) : *args.given_scale;
  if (scale == 0.0f) scale = 1.0f;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.scale[0] = scale;
    args.scale[1] = 1.0f / scale;
  }
  uint32_t left[kThreadRows], right[kThreadRows];  // codes of columns 0 to 3 and 4 to 7
  float amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      const float value = in[r].at(c);
      amax = larger(amax, value);
      x[c] = value * scale;
    }
    left[r] = codes_of<Type>(x[0], x[1], x[2], x[3]);
    right[r] = codes_of<Type>(x[4], x[5], x[6], x[7]);
    if (args.in_rows != nullptr && inside)
      *reinterpret_cast<uint2*>(args.in_rows + (row + r) * args.columns + column) =
          make_uint2(left[r], right[r]);
  }
  if (args.new_amax != nullptr) raise_amax(args.new_amax, amax, shared);
  if (args.in_columns == nullptr) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
    if (half == 0) {
      turn_bytes(left[0], left[1], left[2], left[3], words);
    } else {
      turn_bytes(right[0], right[1], right[2], right[3], words);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c)
      turned[(kThreadColumns * column_group + 4 * half + c) * 32 +
             (row_group ^ (4 * column_group))] = words[c];
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int index = static_cast<int>(threadIdx.x) + 256 * pass, c = index / 8, chunk = index % 8;
    const int64_t to_row = tile_row + 16 * chunk, to_column = tile_column + c;
    if (to_row >= args.rows || to_column >= args.columns) continue;
    *reinterpret_cast<uint4*>(args.in_columns + to_column * args.rows + to_row) =
        *reinterpret_cast<const uint4*>(turned + c * 32 + 4 * (chunk ^ (c / 8)));
  }
}

// A block per 128 x 128 elements. A thread holds 2 groups of 4 rows by 8 columns.
template <class T, Fp8Type Type>
__global__ void __launch_bounds__(256) block_cast_kernel(Fp8BlockCast args) {
  constexpr int kB = static_cast<int>(kFp8Block), kGroups = 2;
  __shared__ __align__(16) uint32_t turned[kB * kB / 4];
  __shared__ float of_columns[8][kB], column_scale[kB], shared[33];
  const int64_t across = args.columns / kB;
  const int64_t block_row = blockIdx.x / across, block_column = blockIdx.x % across;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int column_group = lane % 16;
  const int64_t column = block_column * kB + kThreadColumns * column_group;
  int row_group[kGroups];
  Eight<T> in[kGroups][kThreadRows];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    row_group[g] = 16 * g + 2 * warp + lane / 16;
    const int64_t row = block_row * kB + kThreadRows * row_group[g];
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r)
      in[g][r].load(static_cast<const T*>(args.x) + (row + r) * args.columns + column);
  }
  float of_row[kGroups][kThreadRows], of_column[kThreadColumns] = {}, of_all = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      of_row[g][r] = 0.0f;
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        of_row[g][r] = larger(of_row[g][r], in[g][r].at(c));
        of_column[c] = larger(of_column[c], in[g][r].at(c));
      }
      of_all = fmaxf(of_all, of_row[g][r]);
    }
  }
  if (args.square) {
    of_all = reduce_block(of_all, MaxOp{}, shared);
    const float scale = fp8_power_of_two_scale(of_all, largest_of(Type));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) of_row[g][r] = scale;
    }
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) of_column[c] = scale;
    if (threadIdx.x == 0) {
      if (args.in_rows != nullptr)
        args.row_scales[block_row * up4(across) + block_column] = 1.0f / scale;
      if (args.in_columns != nullptr)
        args.column_scales[block_column * up4(args.rows / kB) + block_row] = 1.0f / scale;
    }
  } else {
    if (args.in_rows != nullptr) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
          for (int offset = 8; offset > 0; offset /= 2)
            of_row[g][r] = fmaxf(of_row[g][r], __shfl_xor_sync(0xffffffffu, of_row[g][r], offset));
          of_row[g][r] = fp8_power_of_two_scale(of_row[g][r], largest_of(Type));
          if (column_group == 0) {
            args.row_scales[block_column * args.rows + block_row * kB + kThreadRows * row_group[g] +
                            r] = 1.0f / of_row[g][r];
          }
        }
      }
    }
    if (args.in_columns != nullptr) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        of_column[c] = fmaxf(of_column[c], __shfl_xor_sync(0xffffffffu, of_column[c], 16));
        if (lane < 16) of_columns[warp][kThreadColumns * column_group + c] = of_column[c];
      }
      __syncthreads();
      if (threadIdx.x < kB) {
        float most = of_columns[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < 8; ++w) most = fmaxf(most, of_columns[w][threadIdx.x]);
        const float scale = fp8_power_of_two_scale(most, largest_of(Type));
        column_scale[threadIdx.x] = scale;
        args.column_scales[block_row * args.columns + block_column * kB + threadIdx.x] =
            1.0f / scale;
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c)
        of_column[c] = column_scale[kThreadColumns * column_group + c];
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int64_t row = block_row * kB + kThreadRows * row_group[g];
    if (args.in_rows != nullptr) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
        const float s = of_row[g][r];
        const Eight<T>& x = in[g][r];
        *reinterpret_cast<uint2*>(args.in_rows + (row + r) * args.columns + column) =
            make_uint2(codes_of<Type>(x.at(0) * s, x.at(1) * s, x.at(2) * s, x.at(3) * s),
                       codes_of<Type>(x.at(4) * s, x.at(5) * s, x.at(6) * s, x.at(7) * s));
      }
    }
    if (args.in_columns != nullptr) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        const float s = of_column[c];
        turned[(kThreadColumns * column_group + c) * 32 + (row_group[g] ^ (2 * column_group))] =
            codes_of<Type>(in[g][0].at(c) * s, in[g][1].at(c) * s, in[g][2].at(c) * s,
                           in[g][3].at(c) * s);
      }
    }
  }
  if (args.in_columns == nullptr) return;
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int index = static_cast<int>(threadIdx.x) + 256 * pass, c = index / 8, chunk = index % 8;
    const int group = c / 8;  // its column_group: 2 group = 4 (group / 2) + 2 (group % 2)
    uint4 words = *reinterpret_cast<const uint4*>(turned + c * 32 + 4 * (chunk ^ (group / 2)));
    if (group % 2 == 1) words = make_uint4(words.z, words.w, words.x, words.y);
    *reinterpret_cast<uint4*>(args.in_columns + (block_column * kB + c) * args.rows +
                              block_row * kB + 16 * chunk) = words;
  }
}

// A block of threads per slot.
__global__ void delayed_scale_update_kernel(DelayedScaleUpdate args) {
  __shared__ float shared[33];
  const int64_t slot = blockIdx.x;
  float* scale = args.state + slot * (1 + args.history_length);
  float* history = scale + 1;
  const float newest = args.amax[slot];
  float most = 0.0f;
  // From the oldest on, a run of threads at a time: what a run overwrites it has read.
  for (int64_t end = args.history_length; end > 0; end -= blockDim.x) {
    const int64_t i = end - 1 - static_cast<int64_t>(threadIdx.x);
    const float moved = i > 0 ? history[i - 1] : newest;
    __syncthreads();
    if (i >= 0) {
      history[i] = moved;
      most = fmaxf(most, moved);
    }
    __syncthreads();
  }
  most = reduce_block(most, MaxOp{}, shared);
  if (threadIdx.x != 0) return;
  const float largest = largest_of(slot % 3 == 2 ? args.gradient_type : Fp8Type::kE4M3);
  *scale = delayed_scale(args.most_recent ? newest : most, largest, args.factor, *scale);
  args.amax[slot] = 0.0f;
}

template <class F>
void with_type(Fp8Type type, F&& f) {
  if (type == Fp8Type::kE4M3) {
    f(std::integral_constant<Fp8Type, Fp8Type::kE4M3>{});
  } else {
    f(std::integral_constant<Fp8Type, Fp8Type::kE5M2>{});
  }
}

// f(T{}) with the CUDA type of a dtype that has a cast.
template <class F>
void with_cast_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
    default:
      MEGATRON_ASSERT(false, "no FP8 kernel for ", to_string(dtype));
  }
}

bool is_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

}  // namespace

void amax_cuda(const Amax& args, void* stream) {
  MEGATRON_ASSERT(is_aligned({args.x}), "amax of a tensor that is not 16-byte aligned");
  with_cast_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const unsigned blocks = std::min(kAmaxBlocks, blocks_for(args.count / (Pack<T>::kSize * 4)));
    amax_kernel<T><<<blocks, kThreads, 0, as_stream(stream)>>>(args);
  });
  check_cuda(cudaGetLastError(), "amax");
}

void fp8_cast_cuda(const Fp8Cast& args, void* stream) {
  MEGATRON_ASSERT(args.rows % 16 == 0 && args.columns % 16 == 0 &&
                      is_aligned({args.x, args.in_rows, args.in_columns}),
                  "FP8 cast of [", args.rows, ", ", args.columns,
                  "]: expected multiples of 16, 16-byte aligned");
  if (args.rows == 0 || args.columns == 0) return;
  const int64_t tiles =
      (args.rows + kTileRows - 1) / kTileRows * ((args.columns + kTileColumns - 1) / kTileColumns);
  with_cast_type(args.dtype, [&](auto x) {
    with_type(args.type, [&](auto type) {
      cast_kernel<decltype(x), type()>
          <<<static_cast<unsigned>(tiles), 256, 0, as_stream(stream)>>>(args);
    });
  });
  check_cuda(cudaGetLastError(), "FP8 cast");
}

void fp8_block_cast_cuda(const Fp8BlockCast& args, void* stream) {
  MEGATRON_ASSERT(args.rows % kFp8Block == 0 && args.columns % kFp8Block == 0 &&
                      is_aligned({args.x, args.in_rows, args.in_columns}),
                  "FP8 block cast of [", args.rows, ", ", args.columns,
                  "]: expected multiples of 128, 16-byte aligned");
  const int64_t blocks = args.rows / kFp8Block * (args.columns / kFp8Block);
  if (blocks == 0) return;
  with_cast_type(args.dtype, [&](auto x) {
    with_type(args.type, [&](auto type) {
      block_cast_kernel<decltype(x), type()>
          <<<static_cast<unsigned>(blocks), 256, 0, as_stream(stream)>>>(args);
    });
  });
  check_cuda(cudaGetLastError(), "FP8 block cast");
}

void delayed_scale_update_cuda(const DelayedScaleUpdate& args, void* stream) {
  if (args.slots == 0) return;
  delayed_scale_update_kernel<<<static_cast<unsigned>(args.slots), 256, 0, as_stream(stream)>>>(
      args);
  check_cuda(cudaGetLastError(), "delayed scale update");
}

}  // namespace megatron
