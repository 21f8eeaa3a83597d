#include <cub/block/block_scan.cuh>

#include "megatron/kernels/detail/grouped_gemm_sm90.cuh"
#include "megatron/kernels/experts/grouped_gemm.h"

namespace megatron {
namespace {

constexpr int kPrepareThreads = 256;
constexpr int64_t kManyRows = 1024;  // per expert, when rows are spread evenly

__device__ __forceinline__ int64_t count_of(const GroupedGemm& gemm, int64_t expert) {
  return gemm.wide_counts ? static_cast<const int64_t*>(gemm.counts)[expert]
                          : static_cast<const int32_t*>(gemm.counts)[expert];
}

// Sizes, addresses and strides of all groups, by the first block. A group without rows gets size 0
// and so no tile; the other blocks zero such an expert's weight gradient if beta is 0.
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_groups(GroupedGemm gemm, GroupArrays arrays) {
  const int64_t elements = gemm.n * gemm.k;
  if (blockIdx.x > 0) {
    const int64_t expert = blockIdx.y;
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
  __shared__ typename Scan::TempStorage storage;
  const bool weight_grad = gemm.product == GroupedProduct::kWeightGrad;
  const bool forward = gemm.product == GroupedProduct::kForward;
  const int64_t width_a = forward ? gemm.k : gemm.n, width_d = forward ? gemm.n : gemm.k;
  const auto* a = static_cast<const cutlass::bfloat16_t*>(gemm.a);
  const auto* b = static_cast<const cutlass::bfloat16_t*>(gemm.b);
  int64_t before = 0;
  for (int64_t base = 0; base < gemm.experts; base += kPrepareThreads) {
    const int64_t expert = base + threadIdx.x;
    const int64_t given = expert < gemm.experts ? count_of(gemm, expert) : 0;
    int64_t first, total;
    Scan(storage).ExclusiveSum(given > 0 ? given : 0, first, total);
    __syncthreads();
    first += before;
    before += total;
    if (expert >= gemm.experts) continue;
    // Never beyond the last row, whatever the counts say.
    first = first < gemm.rows ? first : gemm.rows;
    const int64_t left = gemm.rows - first;
    const int64_t count = given <= 0 ? 0 : given < left ? given : left;
    const int n = static_cast<int>(gemm.n), k = static_cast<int>(gemm.k),
              rows = static_cast<int>(count);
    arrays.a[expert] = a + first * width_a;
    if (weight_grad) {
      arrays.sizes[expert] = {rows > 0 ? n : 0, k, rows};
      arrays.b[expert] = b + first * gemm.k;
      arrays.d[expert] = static_cast<float*>(gemm.d) + expert * elements;
    } else {
      arrays.sizes[expert] = {rows, forward ? n : k, forward ? k : n};
      arrays.b[expert] = b + expert * elements;
      arrays.d[expert] = static_cast<cutlass::bfloat16_t*>(gemm.d) + first * width_d;
    }
    arrays.lda[expert] = width_a;
    arrays.ldb[expert] = gemm.k;
    arrays.ldd[expert] = width_d;
  }
}

constexpr int64_t kWorkspaceAlignment = 256;
// Five maps of 128 bytes per group, in two aligned parts.
int64_t map_bytes(int64_t experts) { return experts * 5 * 128 + 1024; }

int64_t aligned(int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

GroupArrays arrays_in(void* workspace, int64_t experts) {
  char* at = static_cast<char*>(workspace);
  const auto take = [&](auto*& pointer, int64_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
    at += bytes * experts;
  };
  GroupArrays arrays;
  take(arrays.a, 8);
  take(arrays.b, 8);
  take(arrays.d, 8);
  take(arrays.lda, 8);
  take(arrays.ldb, 8);
  take(arrays.ldd, 8);
  take(arrays.sizes, 12);
  return arrays;
}

}  // namespace

bool has_grouped_gemm() { return is_hopper(); }

int64_t grouped_gemm_workspace(int64_t experts) {
  return aligned(experts * GroupArrays::kBytes) + map_bytes(experts);
}

void grouped_gemm_cuda(const GroupedGemm& gemm, void* stream) {
  const bool weight_grad = gemm.product == GroupedProduct::kWeightGrad;
  const GroupArrays arrays = arrays_in(gemm.workspace, gemm.experts);
  void* maps = static_cast<char*>(gemm.workspace) + aligned(gemm.experts * GroupArrays::kBytes);
  const dim3 grid = weight_grad && gemm.beta == 0.0f
                        ? dim3(1 + 32, static_cast<unsigned>(gemm.experts))
                        : dim3(1);
  prepare_groups<<<grid, kPrepareThreads, 0, as_stream(stream)>>>(gemm, arrays);
  check_cuda(cudaGetLastError(), "preparation of a grouped product");
  const auto multiply = [&](auto kernel) {
    decltype(kernel)::run(gemm.experts, arrays, gemm.beta, maps, map_bytes(gemm.experts),
                          as_stream(stream));
  };
  switch (gemm.product) {
    case GroupedProduct::kForward:
      return multiply(GroupedKernel<GroupedProduct::kForward, false>());
    case GroupedProduct::kInputGrad:
      return multiply(GroupedKernel<GroupedProduct::kInputGrad, false>());
    case GroupedProduct::kWeightGrad:
      // A sum has as many terms as the expert has rows.
      if (gemm.rows < kManyRows * gemm.experts)
        return multiply(GroupedKernel<GroupedProduct::kWeightGrad, true>());
      return multiply(GroupedKernel<GroupedProduct::kWeightGrad, false>());
  }
}

}  // namespace megatron
