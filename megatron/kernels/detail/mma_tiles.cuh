// Tiles of 16-bit elements in shared memory and their products on tensor cores by warps
// (mma.m16n8k16, fp32 sums). A tile has rows of D elements in chunks of 16 bytes; a chunk's place
// is the exclusive or with its row, so that neither copies nor loads of fragments conflict.
#pragma once

#include "megatron/kernels/detail/async_copy.cuh"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {

constexpr int kWarpThreads = 32;

// Of a softmax in powers of two.
constexpr float kLog2E = 1.4426950408889634f;

// 2^x; numbers that are not normal become 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What the scores of a softmax are relative to: of a row that has seen nothing any number in place
// of -infinity minus itself.
__device__ __forceinline__ float finite_base(float most) { return most == -INFINITY ? 0.0f : most; }

// Two elements in a register.
template <class T>
__device__ __forceinline__ uint32_t pack_two(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
    memcpy(&word, &two, sizeof word);
  } else {
    const __half2 two = __floats2half2_rn(low, high);
    memcpy(&word, &two, sizeof word);
  }
  return word;
}

// d += a b; a [16, 16], b [16, 8], d [16, 8]. Of d a thread has columns 2 (lane % 4) and the next
// in rows lane / 4 (d[0], d[1]) and lane / 4 + 8 (d[2], d[3]).
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight rows of eight 16-bit elements, two of row lane / 4 in each thread, as their columns.
__device__ __forceinline__ uint32_t transposed(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// A tile in shared memory; T is a 16-bit type.
template <class T, int D>
struct SharedTile {
  static constexpr int kChunks = D / 8;

  uint32_t at;  // its address there

  __device__ __forceinline__ explicit SharedTile(const void* memory)
      : at(static_cast<uint32_t>(__cvta_generic_to_shared(memory))) {}

  __device__ __forceinline__ uint32_t chunk(int row, int column) const {
    return at + static_cast<uint32_t>(row * D * 2 + ((column ^ (row & 7)) << 4));
  }

  // Starts copies of `Rows` rows from global memory by all threads of a block; those from `valid`
  // on become zeros.
  template <int Rows, int Threads>
  __device__ __forceinline__ void copy(const T* from, int64_t stride, int64_t valid) const {
#pragma unroll
    for (int i = 0; i < Rows * kChunks / Threads; ++i) {
      const int index = i * Threads + static_cast<int>(threadIdx.x), row = index / kChunks,
                column = index % kChunks;
      const bool inside = row < valid;
      copy_async_or_zero(chunk(row, column), from + (inside ? row * stride : 0) + column * 8,
                         inside);
    }
  }

  // Rows row ... row + 15, columns 16 step ... 16 step + 15 as a.
  __device__ __forceinline__ void load_a(uint32_t (&a)[4], int row, int step) const {
    load<false>(a, in_rows(row, step));
  }
  // An a of the transposed tile: its rows are columns 16 step ..., its columns rows from `row` on.
  __device__ __forceinline__ void load_a_of_columns(uint32_t (&a)[4], int row, int step) const {
    load<true>(a, in_columns(row, step));
  }
  // Two b's of the transposed tile: n is 16 rows from `row` on, k columns 16 step ...
  __device__ __forceinline__ void load_b_of_rows(uint32_t (&b)[4], int row, int step) const {
    load<false>(b, in_columns(row, step));
  }
  // Two b's of the tile: k is 16 rows from `row` on, n columns 16 step ...
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], int row, int step) const {
    load<true>(b, in_rows(row, step));
  }

 private:
  // Where a lane reads its row of four 8 x 8 tiles of [row, row + 16) x [16 step, 16 step + 16),
  // those below each other or those side by side first.
  __device__ __forceinline__ uint32_t in_rows(int row, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    return chunk(row + lane % 16, 2 * step + lane / 16);
  }
  __device__ __forceinline__ uint32_t in_columns(int row, int step) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    return chunk(row + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2);
  }
  template <bool Transposed>
  __device__ __forceinline__ static void load(uint32_t (&tiles)[4], uint32_t from) {
    if constexpr (Transposed)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                   : "r"(from));
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                   : "r"(from));
  }
};

}  // namespace megatron
