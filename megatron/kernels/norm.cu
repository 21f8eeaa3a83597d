#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/norm.h"

// Note [Norm kernels]
// Rows whose length is a multiple of 16 bytes are held in registers, some packs a thread: the
// forward reads x once; the backward reads dy and x once, loads the next row while it reduces this
// one, and keeps the weight gradients of its rows in registers, each thread those of its own
// columns, so that their order is fixed. Other lengths take the kernels below.
namespace megatron {
namespace {

constexpr int kForwardPacks =
    4;  // of a thread; the backward holds more per pack and takes 1, or 2 for long rows

// A product that is rounded by itself, where contraction would leave the rounding of one of two
// equal products.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Sums over the block, in a fixed order; every thread gets them. At most one barrier: `turn`
// alternates between calls.
template <int Count, class Acc>
__device__ void sum_block(Acc (&sums)[Count], Acc (&shared)[2][32][Count], int turn) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int c = 0; c < Count; ++c) sums[c] += __shfl_xor_sync(0xffffffffu, sums[c], offset);
  }
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int c = 0; c < Count; ++c) shared[turn][threadIdx.x / 32][c] = sums[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Count; ++c) sums[c] = lane < warps ? shared[turn][lane][c] : Acc(0);
  for (int offset = warps > 16 ? 16 : warps > 8 ? 8 : warps > 4 ? 4 : 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int c = 0; c < Count; ++c) sums[c] += __shfl_xor_sync(0xffffffffu, sums[c], offset);
  }
#pragma unroll
  for (int c = 0; c < Count; ++c) sums[c] = __shfl_sync(0xffffffffu, sums[c], 0);
}

// Rows blockIdx.x, blockIdx.x + gridDim.x, ...; a thread holds the packs threadIdx.x, threadIdx.x +
// blockDim.x, ... of one.
template <class T, bool LayerNorm>
__global__ void norm_forward_packs(NormForward norm) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize;
  __shared__ Acc shared[2][32][1];
  const int n = static_cast<int>(norm.columns), stride = static_cast<int>(blockDim.x) * kSize;
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const Acc* biases = static_cast<const Acc*>(norm.bias);
  Pack<T> next[kForwardPacks] = {};
  const auto load = [&](int64_t row) {
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      const int i = first + p * stride;
      if (i < n) next[p] = load_group<Pack<T>>(static_cast<const T*>(norm.x) + row * n + i);
    }
  };
  load(blockIdx.x);
  float amax = 0.0f;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
    Pack<T> x[kForwardPacks];
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) x[p] = next[p];  // zeros beyond the row
    if (row + gridDim.x < norm.rows) load(row + gridDim.x);
    Acc mean = 0, rstd;
    if (norm.saved_statistics) {
      if constexpr (LayerNorm) mean = static_cast<const Acc*>(norm.mean)[row];
      rstd = static_cast<const Acc*>(norm.rstd)[row];
    } else {
      if constexpr (LayerNorm) {
        Acc sum[1] = {};
#pragma unroll
        for (int p = 0; p < kForwardPacks; ++p) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) sum[0] += load_as<Acc>(x[p].at[j]);
        }
        sum_block(sum, shared, turn);
        turn ^= 1;
        mean = sum[0] / Acc(n);
      }
      Acc square[1] = {};
#pragma unroll
      for (int p = 0; p < kForwardPacks; ++p) {
        if (first + p * stride >= n) break;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const Acc centered = load_as<Acc>(x[p].at[j]) - mean;
          square[0] += centered * centered;
        }
      }
      sum_block(square, shared, turn);
      turn ^= 1;
      rstd = Acc(1) / sqrt(square[0] / Acc(n) + static_cast<Acc>(norm.eps));
      if (threadIdx.x == 0) {
        if constexpr (LayerNorm) static_cast<Acc*>(norm.mean)[row] = mean;
        static_cast<Acc*>(norm.rstd)[row] = rstd;
      }
    }
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      const int i = first + p * stride;
      if (i >= n) break;
      Acc gain[kSize], bias[kSize] = {};
      load_run(static_cast<const Acc*>(norm.gain) + i, gain);
      if (biases != nullptr) load_run(biases + i, bias);
      Pack<T> out;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc scaled = (load_as<Acc>(x[p].at[j]) - mean) * rstd * gain[j];
        store_as(out.at[j], biases != nullptr ? scaled + bias[j] : scaled);
      }
      store_group(static_cast<T*>(norm.y) + row * n + i, out);
      if (norm.amax != nullptr) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) amax = larger(amax, load_as<float>(out.at[j]));
      }
    }
  }
  if (norm.amax != nullptr) {
    __shared__ float for_amax[33];
    raise_amax(norm.amax, amax, for_amax);
  }
}

// dx and the partial weight gradients of kNormRowsPerBlock rows a block.
template <class T, bool LayerNorm, bool Residual, int Packs>
__global__ void norm_backward_packs(NormBackward norm) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize, kSums = LayerNorm ? 2 : 1;
  __shared__ Acc shared[2][32][kSums];
  struct Loaded {
    Pack<T> dy[Packs], x[Packs], residual[Residual ? Packs : 1];
    Acc mean, rstd;
  };
  const int n = static_cast<int>(norm.columns), stride = static_cast<int>(blockDim.x) * kSize;
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const int64_t begin = int64_t{blockIdx.x} * kNormRowsPerBlock;
  const int64_t end = begin + kNormRowsPerBlock < norm.rows ? begin + kNormRowsPerBlock : norm.rows;
  const Acc* gains = static_cast<const Acc*>(norm.gain);
  const auto load = [&](int64_t row, Loaded& to) {
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      const int i = first + p * stride;
      if (i >= n) break;
      to.dy[p] = load_group<Pack<T>>(static_cast<const T*>(norm.dy) + row * n + i);
      to.x[p] = load_group<Pack<T>>(static_cast<const T*>(norm.x) + row * n + i);
      if constexpr (Residual) {
        to.residual[p] =
            load_group<Pack<T>>(static_cast<const T*>(norm.residual_grad) + row * n + i);
      }
    }
    to.mean = LayerNorm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
    to.rstd = static_cast<const Acc*>(norm.rstd)[row];
  };
  Acc dgain[Packs][kSize] = {}, dbias[LayerNorm ? Packs : 1][kSize] = {};
  Loaded next = {};
  load(begin, next);
  for (int64_t row = begin; row < end; ++row) {
    const Loaded now = next;
    if (row + 1 < end) load(row + 1, next);
    Acc sums[kSums] = {};  // of gain dy xhat; of gain dy
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (first + p * stride >= n) break;
      Acc gain[kSize];
      load_run(gains + first + p * stride, gain);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc grad = load_as<Acc>(now.dy[p].at[j]),
                  xhat = (load_as<Acc>(now.x[p].at[j]) - now.mean) * now.rstd;
        const Acc g = rounded_product(gain[j], grad);
        sums[0] += g * xhat;
        dgain[p][j] += grad * xhat;
        if constexpr (LayerNorm) {
          sums[1] += g;
          dbias[p][j] += grad;
        }
      }
    }
    sum_block(sums, shared, static_cast<int>(row & 1));
    const Acc mean_gx = sums[0] / Acc(n), mean_g = LayerNorm ? sums[kSums - 1] / Acc(n) : Acc(0);
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      const int i = first + p * stride;
      if (i >= n) break;
      Acc gain[kSize];
      load_run(gains + i, gain);
      Pack<T> out;
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc xhat = (load_as<Acc>(now.x[p].at[j]) - now.mean) * now.rstd;
        Acc value = now.rstd * (rounded_product(gain[j], load_as<Acc>(now.dy[p].at[j])) - mean_g -
                                xhat * mean_gx);
        if constexpr (Residual) value += load_as<Acc>(now.residual[p].at[j]);
        store_as(out.at[j], value);
      }
      store_group(static_cast<T*>(norm.dx) + row * n + i, out);
    }
  }
  const int64_t partial = int64_t{blockIdx.x} * n + first;
#pragma unroll
  for (int p = 0; p < Packs; ++p) {
    if (first + p * stride >= n) break;
    store_run(static_cast<Acc*>(norm.dgain) + partial + p * stride, dgain[p]);
    if constexpr (LayerNorm) {
      if (norm.dbias != nullptr)
        store_run(static_cast<Acc*>(norm.dbias) + partial + p * stride, dbias[p]);
    }
  }
}

// One block per row of any length.
template <class T>
__global__ void norm_forward_any(NormForward norm) {
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
  float amax = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc value = (load_as<Acc>(x[i]) - mean) * rstd * gain[i];
    store_as(y[i], bias != nullptr ? value + bias[i] : value);
    amax = larger(amax, load_as<float>(y[i]));
  }
  if (norm.amax != nullptr) {
    __shared__ float for_amax[33];
    raise_amax(norm.amax, amax, for_amax);
  }
}

// dx, one block per row of any length.
template <class T>
__global__ void norm_input_grad_any(NormBackward norm) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t n = norm.columns, row = blockIdx.x;
  const T* dy = static_cast<const T*>(norm.dy) + row * n;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  const T* residual =
      norm.residual_grad == nullptr ? nullptr : static_cast<const T*>(norm.residual_grad) + row * n;
  T* dx = static_cast<T*>(norm.dx) + row * n;
  const Acc* gain = static_cast<const Acc*>(norm.gain);
  const Acc mean = norm.layer_norm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
  const Acc rstd = static_cast<const Acc*>(norm.rstd)[row];
  Acc sum_g = 0, sum_gx = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc g = rounded_product(gain[i], load_as<Acc>(dy[i]));
    sum_g += g;
    sum_gx += g * ((load_as<Acc>(x[i]) - mean) * rstd);
  }
  const Acc mean_gx = reduce_block(sum_gx, AddOp{}, shared) / Acc(n);
  const Acc mean_g = norm.layer_norm ? reduce_block(sum_g, AddOp{}, shared) / Acc(n) : Acc(0);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc xhat = (load_as<Acc>(x[i]) - mean) * rstd;
    Acc value = rstd * (rounded_product(gain[i], load_as<Acc>(dy[i])) - mean_g - xhat * mean_gx);
    if (residual != nullptr) value += load_as<Acc>(residual[i]);
    store_as(dx[i], value);
  }
}

// Partial sums of the weight gradients: a thread per column and row block, rows in order.
template <class T>
__global__ void norm_weight_grad_any(NormBackward norm) {
  using Acc = AccumulateType<T>;
  const int64_t n = norm.columns, column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                block = blockIdx.y;
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

// Threads for a row in registers; 0: it is too long.
template <class T>
unsigned threads_for_packs(int64_t columns, int packs) {
  const int64_t threads = (columns / Pack<T>::kSize + packs - 1) / packs;
  return threads > 1024 ? 0 : static_cast<unsigned>((threads + 31) / 32 * 32);
}

template <class T>
void forward(const NormForward& norm, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(norm.rows);
  const unsigned threads = fits_packs<T>(norm.columns, {norm.x, norm.y, norm.gain, norm.bias})
                               ? threads_for_packs<T>(norm.columns, kForwardPacks)
                               : 0;
  if (threads == 0) {
    norm_forward_any<T><<<rows, threads_for_row(norm.columns), 0, stream>>>(norm);
    return;
  }
  const unsigned blocks =
      std::min(rows, 8192 * 32 / threads);  // enough to fill any GPU, with some rows each
  const auto kernel = norm.layer_norm ? norm_forward_packs<T, true> : norm_forward_packs<T, false>;
  kernel<<<blocks, threads, 0, stream>>>(norm);
}

template <class T, int Packs>
auto backward_kernel(const NormBackward& norm) {
  const bool residual = norm.residual_grad != nullptr;
  if (norm.layer_norm) {
    return residual ? norm_backward_packs<T, true, true, Packs>
                    : norm_backward_packs<T, true, false, Packs>;
  }
  return residual ? norm_backward_packs<T, false, true, Packs>
                  : norm_backward_packs<T, false, false, Packs>;
}

template <class T>
void backward(const NormBackward& norm, cudaStream_t stream) {
  const auto row_blocks =
      static_cast<unsigned>((norm.rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock);
  const int packs = norm.columns / Pack<T>::kSize <= 256 ? 1 : 2;
  const unsigned threads =
      fits_packs<T>(norm.columns, {norm.x, norm.dy, norm.dx, norm.residual_grad, norm.gain,
                                   norm.dgain, norm.dbias})
          ? threads_for_packs<T>(norm.columns, packs)
          : 0;
  if (threads != 0) {
    const auto kernel = packs == 1 ? backward_kernel<T, 1>(norm) : backward_kernel<T, 2>(norm);
    kernel<<<row_blocks, threads, 0, stream>>>(norm);
    return;
  }
  norm_input_grad_any<T>
      <<<static_cast<unsigned>(norm.rows), threads_for_row(norm.columns), 0, stream>>>(norm);
  const dim3 grid(static_cast<unsigned>((norm.columns + 127) / 128), row_blocks);
  norm_weight_grad_any<T><<<grid, 128, 0, stream>>>(norm);
}

}  // namespace

void norm_forward_cuda(const NormForward& norm, void* stream) {
  with_cuda_type(norm.dtype, [&](auto type) { forward<decltype(type)>(norm, as_stream(stream)); });
  check_cuda(cudaGetLastError(), "norm forward");
}

void norm_backward_cuda(const NormBackward& norm, void* stream) {
  MEGATRON_ASSERT(norm.layer_norm || norm.dbias == nullptr, "RMSNorm has no bias");
  with_cuda_type(norm.dtype, [&](auto type) { backward<decltype(type)>(norm, as_stream(stream)); });
  check_cuda(cudaGetLastError(), "norm backward");
}

}  // namespace megatron
