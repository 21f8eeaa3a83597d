// Hopper's asynchronous copies and products by name: mbarriers, copies of tiles by tensor maps
// (TMA) and wgmma on bf16 with fp32 sums. Compiled for sm_90a alone.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron::sm90 {

// A tile in shared memory is made of panels: rows of 64 bf16 (128 bytes), 8 rows after each other
// and then the next 8, with the 16-byte pieces of row r at places XORed with r % 8 (the copies'
// 128-byte swizzle). Panels start at multiples of 1024 bytes.
constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
__device__ __forceinline__ uint32_t panel_piece(int row, int piece) {
  return static_cast<uint32_t>(row * kPanelRowBytes + ((piece ^ (row & 7)) << 4));
}

// Of a bf16 matrix of `columns` contiguous elements in rows [tokens, samples] with strides in
// elements; a copy moves 64 columns of `box_rows` tokens of one sample: a panel. Rows past the last
// token are read as zeros and not written.
inline CUtensorMap panel_map(const void* data, int64_t columns, int64_t samples, int64_t tokens,
                             int64_t sample_stride, int64_t token_stride, int box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "cudaGetDriverEntryPointByVersion");
    MEGATRON_CHECK(function != nullptr && found == cudaDriverEntryPointSuccess,
                   "this driver has no tensor maps\nhint: drivers from CUDA 12 on have them");
    return reinterpret_cast<Encode>(function);
  }();
  CUtensorMap map;
  if (samples == 1) sample_stride = token_stride;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(samples),
                               static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(sample_stride) * 2,
                                 static_cast<cuuint64_t>(token_stride) * 2};
  const cuuint32_t box[3] = {kPanelColumns, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  MEGATRON_ASSERT(status == CUDA_SUCCESS, "a tensor map of ", tokens, " x ", samples, " rows of ",
                  columns, " with strides ", token_stride, ", ", sample_stride,
                  " was refused: ", static_cast<int>(status));
  return map;
}

// An address that the compiler computes with where it is used, not before a loop: descriptors of
// operands that were prepared there take registers that sums need.
__device__ __forceinline__ uint32_t used_here(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers, by their shared address

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same address in another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Threads of one warpgroup (or `threads` of them) meet.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---- copies of panels

__device__ __forceinline__ void load_panel(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                           int column, int sample, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(sample), "r"(token)
      : "memory");
}
// To the same place in every block of `blocks` (bits), whose barriers count the bytes.
__device__ __forceinline__ void load_panel_to(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                              int column, int sample, int token, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(sample), "r"(token), "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void store_panel(const CUtensorMap* map, uint32_t from, int column,
                                            int sample, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(column), "r"(sample), "r"(token)
      : "memory");
}
__device__ __forceinline__ void stores_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read their shared memory.
__device__ __forceinline__ void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Between ordinary stores to shared memory and asynchronous reads of them.
__device__ __forceinline__ void async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- wgmma

// An operand whose rows (of M or N) hold 64 consecutive k in each panel row: rows 8 apart are 1024
// bytes apart.
__device__ __forceinline__ uint64_t k_major(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3ffff) >> 4);
}
// An operand whose panel rows are k and hold 64 consecutive rows of M or N; the next 64 are
// `panel_bytes` after.
__device__ __forceinline__ uint64_t mn_major(uint32_t address, uint32_t panel_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{(panel_bytes & 0x3ffff) >> 4} << 16) | ((address & 0x3ffff) >> 4);
}

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// The compiler may not move uses of registers over waits for products into them.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define MEGATRON_D8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MEGATRON_D32(d, i) \
  MEGATRON_D8(d, i), MEGATRON_D8(d, i + 8), MEGATRON_D8(d, i + 16), MEGATRON_D8(d, i + 24)
#define MEGATRON_R32                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MEGATRON_R64                                                                             \
  MEGATRON_R32                                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MEGATRON_R96                                                                             \
  MEGATRON_R64                                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MEGATRON_R112 \
  MEGATRON_R96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define MEGATRON_R128                                                                            \
  MEGATRON_R112                                                                                  \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"

// d [64, N] (+)= a [64, 16] b [16, N]; N is half of the count of sums of a thread. The flags say
// whether an operand is given as k rows (mn_major).
template <int kMnA, int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MEGATRON_R32
      "}, %32, %33, p, 1, 1, %35, %36;\n}"
      : MEGATRON_D32(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(kMnA), "n"(kMnB));
}
template <int kMnA, int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MEGATRON_R64
      "}, %64, %65, p, 1, 1, %67, %68;\n}"
      : MEGATRON_D32(d, 0), MEGATRON_D32(d, 32)
      : "l"(a), "l"(b), "r"(add), "n"(kMnA), "n"(kMnB));
}
template <int kMnA, int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[96], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" MEGATRON_R96
      "}, %96, %97, p, 1, 1, %99, %100;\n}"
      : MEGATRON_D32(d, 0), MEGATRON_D32(d, 32), MEGATRON_D32(d, 64)
      : "l"(a), "l"(b), "r"(add), "n"(kMnA), "n"(kMnB));
}
template <int kMnA, int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[112], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %114, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {" MEGATRON_R112
      "}, %112, %113, p, 1, 1, %115, %116;\n}"
      : MEGATRON_D32(d, 0), MEGATRON_D32(d, 32), MEGATRON_D32(d, 64), MEGATRON_D8(d, 96),
        MEGATRON_D8(d, 104)
      : "l"(a), "l"(b), "r"(add), "n"(kMnA), "n"(kMnB));
}
template <int kMnA, int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MEGATRON_R128
      "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : MEGATRON_D32(d, 0), MEGATRON_D32(d, 32), MEGATRON_D32(d, 64), MEGATRON_D32(d, 96)
      : "l"(a), "l"(b), "r"(add), "n"(kMnA), "n"(kMnB));
}
// The same with a in registers, as the m16n8k16 fragments of each warp's 16 rows.
template <int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MEGATRON_R32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : MEGATRON_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMnB));
}
template <int kMnB>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MEGATRON_R64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : MEGATRON_D32(d, 0), MEGATRON_D32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMnB));
}
#undef MEGATRON_D8
#undef MEGATRON_D32
#undef MEGATRON_R32
#undef MEGATRON_R64
#undef MEGATRON_R96
#undef MEGATRON_R112
#undef MEGATRON_R128

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- fragments

// 8x8 matrices, transposed: of a matrix whose rows are k, the fragments of its columns.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}
// The same as they lie.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t row_address, uint32_t a, uint32_t b,
                                               uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float low_of(uint32_t both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(uint32_t both) {
  return __uint_as_float(both & 0xffff0000u);
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace megatron::sm90
