#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {
namespace {

// A thread per column and row block, rows in order.
template <class T>
__global__ void column_sum_kernel(ColumnSum sum) {
  using Acc = AccumulateType<T>;
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, block = blockIdx.y;
  if (column >= sum.columns) return;
  const T* x = static_cast<const T*>(sum.x);
  const int64_t last = (block + 1) * kColumnSumRows;
  const int64_t end = last < sum.rows ? last : sum.rows;
  Acc total = 0;
  for (int64_t row = block * kColumnSumRows; row < end; ++row)
    total += load_as<Acc>(x[row * sum.columns + column]);
  static_cast<Acc*>(sum.partial)[block * sum.columns + column] = total;
}

// 32 packs of columns per thread block; 8 threads share the rows of a pack and combine their sums
// in a fixed order.
template <class T>
__global__ void column_sum_packs(ColumnSum sum) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize;
  __shared__ Acc shared[8][32][kSize + 1];
  const int64_t column = (int64_t{blockIdx.x} * 32 + threadIdx.x) * kSize;
  const int64_t first = int64_t{blockIdx.y} * kColumnSumRows;
  const T* x = static_cast<const T*>(sum.x);
  Acc total[kSize] = {};
  if (column < sum.columns) {
#pragma unroll
    for (int i = 0; i < kColumnSumRows / 8; ++i) {
      const int64_t row = first + i * 8 + threadIdx.y;
      if (row >= sum.rows) break;
      const Pack<T> pack = load_group<Pack<T>>(x + row * sum.columns + column);
#pragma unroll
      for (int j = 0; j < kSize; ++j) total[j] += load_as<Acc>(pack.at[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) shared[threadIdx.y][threadIdx.x][j] = total[j];
  __syncthreads();
  // 256 threads, 32 * kSize columns.
  for (int i = static_cast<int>(threadIdx.y * 32 + threadIdx.x); i < 32 * kSize; i += 256) {
    const int64_t at = int64_t{blockIdx.x} * 32 * kSize + i;
    if (at >= sum.columns) break;
    Acc whole = 0;
#pragma unroll
    for (int y = 0; y < 8; ++y) whole += shared[y][i / kSize][i % kSize];
    static_cast<Acc*>(sum.partial)[int64_t{blockIdx.y} * sum.columns + at] = whole;
  }
}

// 32 columns per block; kSharers threads of a column share its partial sums and combine them in a
// fixed order.
constexpr int kSharers = 32;
template <class Acc, class T>
__global__ void __launch_bounds__(32 * kSharers) partial_sum_kernel(PartialSum sum) {
  __shared__ Acc parts[kSharers][33];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const Acc* partial = static_cast<const Acc*>(sum.partial);
  Acc total = 0;
  if (column < sum.columns) {
#pragma unroll 4
    for (int64_t block = threadIdx.y; block < sum.blocks; block += kSharers)
      total += partial[block * sum.columns + column];
  }
  parts[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= sum.columns) return;
  for (int i = 1; i < kSharers; ++i) total += parts[i][threadIdx.x];
  T* target = static_cast<T*>(sum.target);
  if (sum.beta != 0) total += static_cast<Acc>(sum.beta) * load_as<Acc>(target[column]);
  store_as(target[column], total);
}

}  // namespace

void column_sum_cuda(const ColumnSum& sum, void* stream) {
  const auto row_blocks = static_cast<unsigned>((sum.rows + kColumnSumRows - 1) / kColumnSumRows);
  with_cuda_type(sum.dtype, [&](auto type) {
    using T = decltype(type);
    if (fits_packs<T>(sum.columns, {sum.x})) {
      constexpr int64_t kColumns = 32 * Pack<T>::kSize;
      const dim3 grid(static_cast<unsigned>((sum.columns + kColumns - 1) / kColumns), row_blocks);
      column_sum_packs<T><<<grid, dim3(32, 8), 0, as_stream(stream)>>>(sum);
    } else {
      const dim3 grid(static_cast<unsigned>((sum.columns + 127) / 128), row_blocks);
      column_sum_kernel<T><<<grid, 128, 0, as_stream(stream)>>>(sum);
    }
  });
  check_cuda(cudaGetLastError(), "column sum");
}

void partial_sum_cuda(const PartialSum& sum, void* stream) {
  const auto blocks = static_cast<unsigned>((sum.columns + 31) / 32);
  const dim3 threads(32, kSharers);
  with_cuda_type(sum.target_dtype, [&](auto type) {
    if (sum.dtype == DType::kFloat64) {
      partial_sum_kernel<double, decltype(type)><<<blocks, threads, 0, as_stream(stream)>>>(sum);
    } else {
      partial_sum_kernel<float, decltype(type)><<<blocks, threads, 0, as_stream(stream)>>>(sum);
    }
  });
  check_cuda(cudaGetLastError(), "partial sum");
}

}  // namespace megatron
