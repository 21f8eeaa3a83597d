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
  for (int64_t row = block * kColumnSumRows; row < end; ++row) total += load_as<Acc>(x[row * sum.columns + column]);
  static_cast<Acc*>(sum.partial)[block * sum.columns + column] = total;
}

// 32 columns per block; 8 threads of a column share its partial sums, combined in a fixed order.
template <class Acc, class T>
__global__ void partial_sum_kernel(PartialSum sum) {
  __shared__ Acc parts[8][33];
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const Acc* partial = static_cast<const Acc*>(sum.partial);
  Acc total = 0;
  if (column < sum.columns) {
    for (int64_t block = threadIdx.y; block < sum.blocks; block += 8) total += partial[block * sum.columns + column];
  }
  parts[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= sum.columns) return;
  for (int i = 1; i < 8; ++i) total += parts[i][threadIdx.x];
  T* target = static_cast<T*>(sum.target);
  if (sum.beta != 0) total += static_cast<Acc>(sum.beta) * load_as<Acc>(target[column]);
  store_as(target[column], total);
}

}  // namespace

void column_sum_cuda(const ColumnSum& sum, void* stream) {
  const dim3 grid(static_cast<unsigned>((sum.columns + 127) / 128),
                  static_cast<unsigned>((sum.rows + kColumnSumRows - 1) / kColumnSumRows));
  with_cuda_type(sum.dtype, [&](auto type) {
    column_sum_kernel<decltype(type)><<<grid, 128, 0, as_stream(stream)>>>(sum);
  });
  check_cuda(cudaGetLastError(), "column sum");
}

void partial_sum_cuda(const PartialSum& sum, void* stream) {
  const auto blocks = static_cast<unsigned>((sum.columns + 31) / 32);
  const dim3 threads(32, 8);
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
