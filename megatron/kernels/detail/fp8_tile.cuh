// Tiles of FP8 values, row-major and transposed, for kernels that cast their result.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/fp8_math.h"

// Note [Transposing codes]
// A thread holds 4 rows x 8 columns of x. The codes of 4 rows at one column form a word; words are
// stored in shared memory as [column][group of 4 rows], with the group XORed by the column so that
// a warp writes to 32 banks and reads 16 bytes (16 rows of a column) per lane without conflicts. A
// warp then writes 128 contiguous bytes of each of 4 transposed rows.
namespace megatron {

constexpr int kThreadRows = 4, kThreadColumns = 8;

template <Fp8Type Type>
__device__ __forceinline__ uint32_t codes_of(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t kKind = Type == Fp8Type::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kKind);
  return low | high << 16;
}

// 8 consecutive elements of an aligned row, as raw words (see unpack).
template <class T>
struct Eight {
  static constexpr int kSize = Pack<T>::kSize, kPacks = kThreadColumns / kSize;
  uint4 packs[kPacks];
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) packs[i] = *reinterpret_cast<const uint4*>(from + i * kSize);
  }
  __device__ __forceinline__ void get(float (&to)[kThreadColumns]) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float part[kSize];
      unpack<T>(packs[i], part);
#pragma unroll
      for (int j = 0; j < kSize; ++j) to[i * kSize + j] = part[j];
    }
  }
  // Assigns, rounding to T.
  __device__ __forceinline__ void set(const float (&from)[kThreadColumns]) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float part[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) part[j] = from[i * kSize + j];
      packs[i] = pack_words<T>(part);
    }
  }
};

// Transposes the bytes of four words: out[i] holds byte i of each of a, b, c, d.
__device__ __forceinline__ void turn_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                           uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
  const uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// A tile of 128 rows and 64 columns per block of 256 threads.
constexpr int kTileRows = 128, kTileColumns = 64, kTileWords = kTileRows * kTileColumns / 4;

// This thread's position in a tile.
struct TilePlace {
  int64_t tile_row, tile_column, row, column;
  int column_group, row_group;
  bool inside;  // dimensions are multiples of 16: a thread's elements are all inside or all outside

  // The tile number `index` of a matrix.
  __device__ __forceinline__ TilePlace(unsigned index, int64_t rows, int64_t columns) {
    const int64_t across = (columns + kTileColumns - 1) / kTileColumns;
    tile_row = index / across * kTileRows;
    tile_column = index % across * kTileColumns;
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    column_group = lane % 8;
    row_group = 4 * warp + lane / 8;
    row = tile_row + kThreadRows * row_group;
    column = tile_column + kThreadColumns * column_group;
    inside = row < rows && column < columns;
  }
};
inline int64_t num_tiles(int64_t rows, int64_t columns) {
  return (rows + kTileRows - 1) / kTileRows * ((columns + kTileColumns - 1) / kTileColumns);
}

// The codes of a thread's 4 x 8 values: columns 0 to 3 and 4 to 7 of each row.
struct TileCodes {
  uint32_t left[kThreadRows], right[kThreadRows];
};

// Writes row-major, `stride` codes per row.
__device__ __forceinline__ void store_rows(const TileCodes& codes, const TilePlace& at, uint8_t* to,
                                           int64_t stride) {
  if (!at.inside) return;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r)
    *reinterpret_cast<uint2*>(to + (at.row + r) * stride + at.column) =
        make_uint2(codes.left[r], codes.right[r]);
}

// Writes to shared memory; a barrier and store_columns() follow.
__device__ __forceinline__ void turn_codes(const TileCodes& codes, const TilePlace& at,
                                           uint32_t* turned) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t (&from)[kThreadRows] = half == 0 ? codes.left : codes.right;
    uint32_t words[4];
    turn_bytes(from[0], from[1], from[2], from[3], words);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      turned[(kThreadColumns * at.column_group + 4 * half + c) * 32 +
             (at.row_group ^ (4 * at.column_group))] = words[c];
  }
}

// Writes transposed: [columns, rows] of the whole matrix.
__device__ __forceinline__ void store_columns(const uint32_t* turned, const TilePlace& at,
                                              uint8_t* to, int64_t rows, int64_t columns) {
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    const int index = static_cast<int>(threadIdx.x) + 256 * pass, c = index / 8, chunk = index % 8;
    const int64_t to_row = at.tile_row + 16 * chunk, to_column = at.tile_column + c;
    if (to_row >= rows || to_column >= columns) continue;
    *reinterpret_cast<uint4*>(to + to_column * rows + to_row) =
        *reinterpret_cast<const uint4*>(turned + c * 32 + 4 * (chunk ^ (c / 8)));
  }
}

// A block of 128 x 128 elements per 512 threads: each holds 4 rows of 8 columns.
constexpr int kBlockSize = static_cast<int>(kFp8Block), kBlockThreads = 512;

struct BlockPlace {
  int64_t block_row, block_column;
  int lane, warp, column_group, row_group;

  // The block number `index` of a matrix of `columns`.
  __device__ __forceinline__ BlockPlace(int64_t index, int64_t columns) {
    const int64_t across = columns / kBlockSize;
    block_row = index / across;
    block_column = index % across;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp = static_cast<int>(threadIdx.x) / 32;
    column_group = lane % 16;
    row_group = 2 * warp + lane / 16;
  }
  __device__ __forceinline__ int64_t row() const {
    return block_row * kBlockSize + kThreadRows * row_group;
  }
  __device__ __forceinline__ int64_t column() const {
    return block_column * kBlockSize + kThreadColumns * column_group;
  }
};

template <class T>
using BlockValues = Eight<T>[kThreadRows];

struct BlockMemory {
  alignas(16) uint32_t turned[kBlockSize * kBlockSize / 4];
  float of_columns[kBlockThreads / 32][kBlockSize], column_scale[kBlockSize], shared[33];
};

// Casts the block and writes it at `block_column` of the result. Called by the whole thread block,
// with a barrier before the next call. Ragged: row-major only the first `rows` of out.rows are
// written, and scales have no padding between them.
template <class T, Fp8Type Type, bool kRagged = false>
__device__ __forceinline__ void store_block(const BlockValues<T>& in, const BlockPlace& at,
                                            const Fp8BlockCast& out, int64_t block_column,
                                            BlockMemory& memory, int64_t rows = 0) {
  const int64_t stored_rows = kRagged ? rows : out.rows;
  const auto inside = [&](int r) { return !kRagged || at.row() + r < rows; };
  const auto padded = [](int64_t blocks) { return kRagged ? blocks : up4(blocks); };
  float of_row[kThreadRows] = {}, of_column[kThreadColumns] = {}, of_all = 0.0f;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    float x[kThreadColumns];
    in[r].get(x);
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      of_row[r] = larger(of_row[r], x[c]);
      of_column[c] = larger(of_column[c], x[c]);
    }
    of_all = fmaxf(of_all, of_row[r]);
  }
  if (out.square) {
    of_all = reduce_block(of_all, MaxOp{}, memory.shared);
    const float scale = fp8_power_of_two_scale(of_all, largest_of(Type));
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) of_row[r] = scale;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) of_column[c] = scale;
    if (threadIdx.x == 0) {
      if (out.in_rows != nullptr)
        out.row_scales[at.block_row * padded(out.columns / kBlockSize) + block_column] =
            1.0f / scale;
      if (out.in_columns != nullptr)
        out.column_scales[block_column * padded(out.rows / kBlockSize) + at.block_row] =
            1.0f / scale;
    }
  } else {
    if (out.in_columns != nullptr) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        of_column[c] = fmaxf(of_column[c], __shfl_xor_sync(0xffffffffu, of_column[c], 16));
        if (at.lane < 16)
          memory.of_columns[at.warp][kThreadColumns * at.column_group + c] = of_column[c];
      }
      __syncthreads();
      if (threadIdx.x < kBlockSize) {
        float most = memory.of_columns[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < kBlockThreads / 32; ++w)
          most = fmaxf(most, memory.of_columns[w][threadIdx.x]);
        const float scale = fp8_power_of_two_scale(most, largest_of(Type));
        memory.column_scale[threadIdx.x] = scale;
        out.column_scales[at.block_row * out.columns + block_column * kBlockSize + threadIdx.x] =
            1.0f / scale;
      }
    }
    if (out.in_rows != nullptr) {
#pragma unroll
      for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2)
          of_row[r] = fmaxf(of_row[r], __shfl_xor_sync(0xffffffffu, of_row[r], offset));
        of_row[r] = fp8_power_of_two_scale(of_row[r], largest_of(Type));
        if (at.column_group == 0 && inside(r)) {
          out.row_scales[block_column * stored_rows + at.block_row * kBlockSize +
                         kThreadRows * at.row_group + r] = 1.0f / of_row[r];
        }
      }
    }
  }
  if (out.in_rows != nullptr) {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
      const float s = of_row[r];
      float x[kThreadColumns];
      in[r].get(x);
      if (!inside(r)) continue;
      *reinterpret_cast<uint2*>(out.in_rows + (at.row() + r) * out.columns +
                                block_column * kBlockSize + kThreadColumns * at.column_group) =
          make_uint2(codes_of<Type>(x[0] * s, x[1] * s, x[2] * s, x[3] * s),
                     codes_of<Type>(x[4] * s, x[5] * s, x[6] * s, x[7] * s));
    }
  }
  if (out.in_columns == nullptr) return;
  if (!out.square) {
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      of_column[c] = memory.column_scale[kThreadColumns * at.column_group + c];
  }
  float x[kThreadRows][kThreadColumns];
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) in[r].get(x[r]);
#pragma unroll
  for (int c = 0; c < kThreadColumns; ++c) {
    const float s = of_column[c];
    memory.turned[(kThreadColumns * at.column_group + c) * 32 +
                  (at.row_group ^ (2 * at.column_group))] =
        codes_of<Type>(x[0][c] * s, x[1][c] * s, x[2][c] * s, x[3][c] * s);
  }
  __syncthreads();
#pragma unroll
  for (int pass = 0; pass < kBlockSize * 8 / kBlockThreads; ++pass) {
    const int index = static_cast<int>(threadIdx.x) + kBlockThreads * pass, c = index / 8,
              chunk = index % 8;
    const int group = c / 8;  // its column group: 2 group = 4 (group / 2) + 2 (group % 2)
    uint4 words =
        *reinterpret_cast<const uint4*>(memory.turned + c * 32 + 4 * (chunk ^ (group / 2)));
    if (group % 2 == 1) words = make_uint4(words.z, words.w, words.x, words.y);
    *reinterpret_cast<uint4*>(out.in_columns + (block_column * kBlockSize + c) * out.rows +
                              at.block_row * kBlockSize + 16 * chunk) = words;
  }
}

template <class F>
void with_fp8_type(Fp8Type type, F&& f) {
  if (type == Fp8Type::kE4M3) {
    f(std::integral_constant<Fp8Type, Fp8Type::kE4M3>{});
  } else {
    f(std::integral_constant<Fp8Type, Fp8Type::kE5M2>{});
  }
}

// f(T{}) with the CUDA type of a dtype that can be cast to FP8.
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

inline bool is_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

}  // namespace megatron
