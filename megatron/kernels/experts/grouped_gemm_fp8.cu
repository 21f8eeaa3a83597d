#include <cub/block/block_scan.cuh>

#include "megatron/kernels/detail/grouped_gemm_fp8_sm90.cuh"
#include "megatron/kernels/experts/grouped_gemm_fp8.h"

namespace megatron {
namespace {

constexpr int kPrepareThreads = 256;

__device__ __forceinline__ int64_t count_of(const GroupedGemmFp8& gemm, int64_t expert) {
  return gemm.wide_counts ? static_cast<const int64_t*>(gemm.counts)[expert]
                          : static_cast<const int32_t*>(gemm.counts)[expert];
}

struct RowsBefore {
  int64_t rows, padded;
};

// Sizes, addresses, strides and factors of one group.
__device__ __forceinline__ void prepare_group(const GroupedGemmFp8& gemm,
                                              const Fp8GroupArrays& arrays, int64_t expert,
                                              const RowsBefore& before, int64_t count,
                                              int64_t padded) {
  const int n = static_cast<int>(gemm.n), k = static_cast<int>(gemm.k),
            rows = static_cast<int>(count);
  if (gemm.weight_grad) {
    arrays.sizes[expert] = {rows > 0 ? n : 0, k, static_cast<int>(padded)};
    arrays.a[expert] = gemm.a + before.padded * gemm.n;
    arrays.b[expert] = gemm.b + before.padded * gemm.k;
    arrays.d[expert] = static_cast<float*>(gemm.d) + expert * gemm.n * gemm.k;
    arrays.lda[expert] = arrays.ldb[expert] = padded;
    arrays.ldd[expert] = gemm.k;
  } else {
    arrays.sizes[expert] = {rows, n, k};
    arrays.a[expert] = gemm.a + before.rows * gemm.k;
    arrays.b[expert] = gemm.b + expert * gemm.n * gemm.k;
    arrays.d[expert] = static_cast<cutlass::bfloat16_t*>(gemm.d) + before.rows * gemm.n;
    arrays.lda[expert] = arrays.ldb[expert] = gemm.k;
    arrays.ldd[expert] = gemm.n;
  }
  if (!gemm.blocks) {
    arrays.alpha[expert] = gemm.a_scale[expert * kFp8ScaleElements + kFp8InverseAt] *
                           gemm.b_scale[expert * kFp8ScaleElements + kFp8InverseAt];
    return;
  }
  const int64_t blocks = gemm.k / kFp8Block, blocks_before = before.padded / kFp8Block;
  arrays.a_scale[expert] =
      gemm.a_scale + (gemm.weight_grad ? blocks_before * gemm.n : before.rows * blocks);
  arrays.b_scale[expert] =
      gemm.b_scale +
      (gemm.weight_grad ? blocks_before * gemm.k : expert * (gemm.n / kFp8Block) * blocks);
}

// All groups, by the first block. A group without rows gets size 0 and so no tile; the other blocks
// zero such an expert's weight gradient if beta is 0.
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(GroupedGemmFp8 gemm, Fp8GroupArrays arrays) {
  if (blockIdx.x > 0) {
    const int64_t expert = blockIdx.y, elements = gemm.n * gemm.k;
    if (count_of(gemm, expert) > 0) return;
    auto* d = reinterpret_cast<float4*>(static_cast<float*>(gemm.d) + expert * elements);
    const int64_t stride = int64_t{gridDim.x - 1} * kPrepareThreads;
    for (int64_t i = int64_t{blockIdx.x - 1} * kPrepareThreads + threadIdx.x; i < elements / 4;
         i += stride)
      d[i] = float4{0, 0, 0, 0};
    return;
  }
  if (blockIdx.y > 0) return;
  using Scan = cub::BlockScan<int64_t, kPrepareThreads>;
  __shared__ typename Scan::TempStorage rows_storage, padded_storage;
  const int64_t unit = gemm.blocks ? kFp8Block : 16;
  RowsBefore before{0, 0};
  for (int64_t base = 0; base < gemm.experts; base += kPrepareThreads) {
    const int64_t expert = base + threadIdx.x;
    const int64_t given = expert < gemm.experts ? count_of(gemm, expert) : 0;
    int64_t count = given > 0 ? given : 0, padded = (count + unit - 1) / unit * unit;
    RowsBefore own, all;
    Scan(rows_storage).ExclusiveSum(count, own.rows, all.rows);
    Scan(padded_storage).ExclusiveSum(padded, own.padded, all.padded);
    __syncthreads();
    own = {own.rows + before.rows, own.padded + before.padded};
    before = {before.rows + all.rows, before.padded + all.padded};
    if (expert >= gemm.experts) continue;
    // Never beyond the last row, whatever the counts say: such an expert has no rows.
    if (own.rows + count > gemm.rows) {
      count = padded = 0;
      own = {0, 0};
    }
    prepare_group(gemm, arrays, expert, own, count, padded);
  }
}

constexpr int64_t kWorkspaceAlignment = 256;
// Five maps of 128 bytes per group, in two aligned parts.
int64_t map_bytes(int64_t experts) { return experts * 5 * 128 + 1024; }

int64_t array_bytes(int64_t experts) {
  return (experts * Fp8GroupArrays::kBytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment *
         kWorkspaceAlignment;
}

Fp8GroupArrays arrays_in(void* workspace, int64_t experts) {
  char* at = static_cast<char*>(workspace);
  const auto take = [&](auto*& pointer) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += static_cast<int64_t>(sizeof(*pointer)) * experts;
  };
  Fp8GroupArrays arrays;
  take(arrays.a);
  take(arrays.b);
  take(arrays.d);
  take(arrays.lda);
  take(arrays.ldb);
  take(arrays.ldd);
  take(arrays.a_scale);
  take(arrays.b_scale);
  take(arrays.sizes);
  take(arrays.alpha);
  return arrays;
}

}  // namespace

int64_t grouped_gemm_fp8_workspace(int64_t experts) {
  return array_bytes(experts) + map_bytes(experts);
}

void grouped_gemm_fp8_cuda(const GroupedGemmFp8& gemm, void* stream) {
  const int64_t unit = gemm.blocks ? kFp8Block : 16;
  MEGATRON_ASSERT(gemm.n % unit == 0 && gemm.k % unit == 0, "a grouped FP8 product with n ", gemm.n,
                  " and k ", gemm.k, ", expected multiples of ", unit);
  const Fp8GroupArrays arrays = arrays_in(gemm.workspace, gemm.experts);
  const dim3 grid = gemm.weight_grad && gemm.beta == 0.0f
                        ? dim3(1 + 32, static_cast<unsigned>(gemm.experts))
                        : dim3(1);
  prepare_groups<<<grid, kPrepareThreads, 0, as_stream(stream)>>>(gemm, arrays);
  check_cuda(cudaGetLastError(), "preparation of a grouped FP8 product");
  const Fp8GroupedRun run{gemm.experts,
                          arrays,
                          gemm.beta,
                          static_cast<char*>(gemm.workspace) + array_bytes(gemm.experts),
                          map_bytes(gemm.experts),
                          as_stream(stream)};
  if (gemm.blocks) return run_grouped_fp8_by_blocks(gemm, run);
  run_grouped_fp8_by_experts(gemm, run);
}

}  // namespace megatron
