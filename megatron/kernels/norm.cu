#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/norm.h"

namespace megatron {
namespace {

// One block per row.
template <class T>
__global__ void norm_forward_kernel(NormForward norm) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t n = norm.columns, row = blockIdx.x;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  T* y = static_cast<T*>(norm.y) + row * n;
  const Acc* gain = static_cast<const Acc*>(norm.gain);
  const Acc* bias = static_cast<const Acc*>(norm.bias);
  Acc mean = 0, rstd;
  if (norm.saved_statistics) {
    if (norm.layer_norm) mean = static_cast<const Acc*>(norm.mean)[row];
    rstd = static_cast<const Acc*>(norm.rstd)[row];
  } else {
    Acc sum = 0;
    if (norm.layer_norm) {
      for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += load_as<Acc>(x[i]);
      mean = reduce_block(sum, AddOp{}, shared) / Acc(n);
    }
    Acc square = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const Acc centered = load_as<Acc>(x[i]) - mean;
      square += centered * centered;
    }
    square = reduce_block(square, AddOp{}, shared);
    rstd = Acc(1) / sqrt(square / Acc(n) + static_cast<Acc>(norm.eps));
    if (threadIdx.x == 0) {
      if (norm.layer_norm) static_cast<Acc*>(norm.mean)[row] = mean;
      static_cast<Acc*>(norm.rstd)[row] = rstd;
    }
  }
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc value = (load_as<Acc>(x[i]) - mean) * rstd * gain[i];
    store_as(y[i], bias != nullptr ? value + bias[i] : value);
  }
}

// dx, one block per row.
template <class T>
__global__ void norm_input_grad_kernel(NormBackward norm) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t n = norm.columns, row = blockIdx.x;
  const T* dy = static_cast<const T*>(norm.dy) + row * n;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  T* dx = static_cast<T*>(norm.dx) + row * n;
  const Acc* gain = static_cast<const Acc*>(norm.gain);
  const Acc mean = norm.layer_norm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
  const Acc rstd = static_cast<const Acc*>(norm.rstd)[row];
  Acc sum_g = 0, sum_gx = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc g = gain[i] * load_as<Acc>(dy[i]);
    sum_g += g;
    sum_gx += g * ((load_as<Acc>(x[i]) - mean) * rstd);
  }
  const Acc mean_gx = reduce_block(sum_gx, AddOp{}, shared) / Acc(n);
  const Acc mean_g = norm.layer_norm ? reduce_block(sum_g, AddOp{}, shared) / Acc(n) : Acc(0);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc xhat = (load_as<Acc>(x[i]) - mean) * rstd;
    store_as(dx[i], rstd * (gain[i] * load_as<Acc>(dy[i]) - mean_g - xhat * mean_gx));
  }
}

// Partial sums of the weight gradients: a thread per column and row block, rows in order.
template <class T>
__global__ void norm_weight_grad_kernel(NormBackward norm) {
  using Acc = AccumulateType<T>;
  const int64_t n = norm.columns, column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, block = blockIdx.y;
  if (column >= n) return;
  const T* dy = static_cast<const T*>(norm.dy);
  const T* x = static_cast<const T*>(norm.x);
  const int64_t last = (block + 1) * kNormRowsPerBlock;
  const int64_t end = last < norm.rows ? last : norm.rows;
  Acc dgain = 0, dbias = 0;
  for (int64_t row = block * kNormRowsPerBlock; row < end; ++row) {
    const Acc mean = norm.layer_norm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
    const Acc rstd = static_cast<const Acc*>(norm.rstd)[row];
    const Acc grad = load_as<Acc>(dy[row * n + column]);
    dgain += grad * ((load_as<Acc>(x[row * n + column]) - mean) * rstd);
    dbias += grad;
  }
  static_cast<Acc*>(norm.dgain)[block * n + column] = dgain;
  if (norm.dbias != nullptr) static_cast<Acc*>(norm.dbias)[block * n + column] = dbias;
}

}  // namespace

void norm_forward_cuda(const NormForward& norm, void* stream) {
  with_cuda_type(norm.dtype, [&](auto type) {
    norm_forward_kernel<decltype(type)>
        <<<static_cast<unsigned>(norm.rows), threads_for_row(norm.columns), 0, as_stream(stream)>>>(norm);
  });
  check_cuda(cudaGetLastError(), "norm forward");
}

void norm_backward_cuda(const NormBackward& norm, void* stream) {
  const auto row_blocks = static_cast<unsigned>((norm.rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock);
  const dim3 grid(static_cast<unsigned>((norm.columns + 127) / 128), row_blocks);
  with_cuda_type(norm.dtype, [&](auto type) {
    norm_input_grad_kernel<decltype(type)>
        <<<static_cast<unsigned>(norm.rows), threads_for_row(norm.columns), 0, as_stream(stream)>>>(norm);
    norm_weight_grad_kernel<decltype(type)><<<grid, 128, 0, as_stream(stream)>>>(norm);
  });
  check_cuda(cudaGetLastError(), "norm backward");
}

}  // namespace megatron
