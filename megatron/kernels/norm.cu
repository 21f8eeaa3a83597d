#include <algorithm>

#include "megatron/kernels/detail/amax.cuh"
#include "megatron/kernels/detail/async_copy.cuh"
#include "megatron/kernels/detail/early_start.cuh"
#include "megatron/kernels/detail/norm_rows.cuh"
#include "megatron/kernels/detail/rounded_product.cuh"
#include "megatron/kernels/norm.h"

// Note [Norm kernels]
// Rows whose length is a multiple of 16 bytes are held in the registers of a thread block, some
// packs per thread, and read once. The forward uses few threads per row; the many rows on an SM
// hide each other's latency. The backward uses one block for the rows of a partial sum: each thread
// keeps the weight gradients of its own columns in registers, so that their order is fixed, and a
// ring loads the next row while this one is summed (Note [Rings of loads]). Other lengths use the
// general kernels.
namespace megatron {
namespace {

constexpr int kForwardPacks = 4;           // packs per thread
constexpr unsigned kForwardThreads = 128;  // minimum per block, for one row or several
constexpr int kBackwardRing = 2;           // rows of a block being loaded or processed
constexpr int64_t kPacksAlone = 512;       // in longer rows a thread of the backward has two packs

// blockDim.y rows at a time; a thread holds packs threadIdx.x, threadIdx.x + blockDim.x, ... of one
// row.
template <class T, class W, bool LayerNorm, unsigned MostThreads>
__global__ void __launch_bounds__(MostThreads, MostThreads == kForwardThreads ? 10 : 1)
    norm_forward_packs(NormForward norm) {
  let_next_kernel_begin();
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize;
  __shared__ Acc shared[2][32][1];
  const int n = static_cast<int>(norm.columns), stride = static_cast<int>(blockDim.x) * kSize;
  const int first = static_cast<int>(threadIdx.x) * kSize;
  float amax = 0.0f;
  int turn = 0;
  for (int64_t begin = int64_t{blockIdx.x} * blockDim.y; begin < norm.rows;
       begin += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = norm.rows - 1 - begin - threadIdx.y;  // Note [Backwards]
    const bool inside = row >= 0;
    uint4 words[kForwardPacks] = {};  // zeros beyond the row
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      const int i = first + p * stride;
      if (inside && i < n) words[p] = load_once(static_cast<const T*>(norm.x) + row * n + i);
    }
    Acc mean = 0, rstd = 0;
    if (norm.saved_statistics) {
      if constexpr (LayerNorm) mean = inside ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
      if (inside) rstd = static_cast<const Acc*>(norm.rstd)[row];
    } else {
      if constexpr (LayerNorm) {
        Acc sum[1] = {};
#pragma unroll
        for (int p = 0; p < kForwardPacks; ++p) {
          Acc x[kSize];
          unpack<T>(words[p], x);
#pragma unroll
          for (int j = 0; j < kSize; ++j) sum[0] += x[j];
        }
        sum_block(sum, shared, turn);
        turn ^= 1;
        mean = sum[0] / Acc(n);
      }
      Acc square[1] = {};
#pragma unroll
      for (int p = 0; p < kForwardPacks; ++p) {
        if (first + p * stride >= n) break;
        Acc x[kSize];
        unpack<T>(words[p], x);
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const Acc centered = x[j] - mean;
          square[0] += centered * centered;
        }
      }
      sum_block(square, shared, turn);
      turn ^= 1;
      rstd = Acc(1) / sqrt(square[0] / Acc(n) + static_cast<Acc>(norm.eps));
      if (threadIdx.x == 0 && inside) {
        if constexpr (LayerNorm) static_cast<Acc*>(norm.mean)[row] = mean;
        static_cast<Acc*>(norm.rstd)[row] = rstd;
      }
    }
    if (!inside || norm.y == nullptr) continue;
#pragma unroll
    for (int p = 0; p < kForwardPacks; ++p) {
      const int i = first + p * stride;
      if (i >= n) break;
      Acc x[kSize], gain[kSize], bias[kSize] = {};
      unpack<T>(words[p], x);
      load_gain<W>(norm, i, gain);
      const bool biased = LayerNorm && norm.bias != nullptr;
      if (biased) load_weights<W>(norm.bias, i, bias);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc scaled = (x[j] - mean) * rstd * gain[j];
        x[j] = biased ? scaled + bias[j] : scaled;
      }
      const uint4 out = pack_words<T>(x);
      store_once(static_cast<T*>(norm.y) + row * n + i, out);
      if (norm.amax != nullptr) {
        unpack<T>(out, x);
#pragma unroll
        for (int j = 0; j < kSize; ++j) amax = larger(amax, static_cast<float>(x[j]));
      }
    }
  }
  if (norm.amax != nullptr) raise_amax_by_warp(norm.amax, amax);
}

// dx and the partial weight gradients of kNormRowsPerBlock rows per thread block.
template <class T, class W, bool LayerNorm, bool Residual, int Packs>
__global__ void __launch_bounds__(1024) norm_backward_packs(NormBackward norm) {
  using Acc = AccumulateType<T>;
  constexpr int kSize = Pack<T>::kSize, kSums = LayerNorm ? 2 : 1, kTensors = Residual ? 3 : 2;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Acc shared[2][32][kSums];
  uint4* const mine = reinterpret_cast<uint4*>(ring) + threadIdx.x;
  const int threads = static_cast<int>(blockDim.x), n = static_cast<int>(norm.columns);
  const int first = static_cast<int>(threadIdx.x) * kSize, stride = threads * kSize;
  const int64_t block = reverse_block(), begin = block * kNormRowsPerBlock;
  const int64_t end = begin + kNormRowsPerBlock < norm.rows ? begin + kNormRowsPerBlock : norm.rows;
  // Tensor 0 is dy, 1 x, 2 the residual's gradient.
  const auto pack_of = [&](int64_t row, int tensor, int p) {
    return mine +
           ((static_cast<int>(row % kBackwardRing) * kTensors + tensor) * Packs + p) * threads;
  };
  const auto start = [&](int64_t row) {
    if (row < end) {
#pragma unroll
      for (int p = 0; p < Packs; ++p) {
        if (first + p * stride >= n) break;
        const int64_t at = row * n + first + p * stride;
        copy_async(pack_of(row, 0, p), static_cast<const T*>(norm.dy) + at);
        copy_async(pack_of(row, 1, p), static_cast<const T*>(norm.x) + at);
        if constexpr (Residual)
          copy_async(pack_of(row, 2, p), static_cast<const T*>(norm.residual_grad) + at);
      }
    }
    end_copy_group();
  };
#pragma unroll
  for (int r = 0; r < kBackwardRing - 1; ++r) start(begin + r);
  Acc gain[Packs][kSize] = {}, dgain[Packs][kSize] = {}, dbias[LayerNorm ? Packs : 1][kSize] = {};
#pragma unroll
  for (int p = 0; p < Packs; ++p) {
    if (first + p * stride < n) load_gain<W>(norm, first + p * stride, gain[p]);
  }
  for (int64_t row = begin; row < end; ++row) {
    start(row + kBackwardRing - 1);  // overwrites the last row
    const Acc mean = LayerNorm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0),
              rstd = static_cast<const Acc*>(norm.rstd)[row];
    wait_for_copies<kBackwardRing - 1>();
    Acc sums[kSums] = {};  // sums of gain dy xhat and of gain dy
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (first + p * stride >= n) break;
      Acc dy[kSize], x[kSize];
      unpack<T>(*pack_of(row, 0, p), dy);
      unpack<T>(*pack_of(row, 1, p), x);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc xhat = (x[j] - mean) * rstd, g = rounded_product(gain[p][j], dy[j]);
        sums[0] += g * xhat;
        dgain[p][j] += dy[j] * xhat;
        if constexpr (LayerNorm) {
          sums[1] += g;
          dbias[p][j] += dy[j];
        }
      }
    }
    sum_block(sums, shared, static_cast<int>(row & 1));
    const Acc mean_gx = sums[0] / Acc(n), mean_g = LayerNorm ? sums[kSums - 1] / Acc(n) : Acc(0);
#pragma unroll
    for (int p = 0; p < Packs; ++p) {
      if (first + p * stride >= n) break;
      Acc dy[kSize], x[kSize], residual[kSize];
      unpack<T>(*pack_of(row, 0, p), dy);
      unpack<T>(*pack_of(row, 1, p), x);
      if constexpr (Residual) unpack<T>(*pack_of(row, 2, p), residual);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc xhat = (x[j] - mean) * rstd;
        x[j] = rstd * (rounded_product(gain[p][j], dy[j]) - mean_g - xhat * mean_gx);
        if constexpr (Residual) x[j] += residual[j];
      }
      *reinterpret_cast<uint4*>(static_cast<T*>(norm.dx) + row * n + first + p * stride) =
          pack_words<T>(x);
    }
  }
  const int64_t partial = block * n + first;
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

// An element of a norm's gain or bias.
template <class T>
__device__ __forceinline__ AccumulateType<T> weight_at(const void* weights, bool as_values,
                                                       int64_t i) {
  using Acc = AccumulateType<T>;
  return as_values ? load_as<Acc>(static_cast<const T*>(weights)[i])
                   : static_cast<const Acc*>(weights)[i];
}
template <class T, class Norm>
__device__ __forceinline__ AccumulateType<T> gain_at(const Norm& norm, bool as_values, int64_t i) {
  using Acc = AccumulateType<T>;
  return weight_at<T>(norm.gain, as_values, i) + (norm.zero_centered ? Acc(1) : Acc(0));
}

// One block per row of any length.
template <class T>
__global__ void norm_forward_any(NormForward norm) {
  using Acc = AccumulateType<T>;
  __shared__ Acc shared[33];
  const int64_t n = norm.columns, row = blockIdx.x;
  const T* x = static_cast<const T*>(norm.x) + row * n;
  T* y = static_cast<T*>(norm.y) + row * n;  // not used if y is null
  const bool as_values = norm.weights_as_x;
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
  if (norm.y == nullptr) return;
  float amax = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc value = (load_as<Acc>(x[i]) - mean) * rstd * gain_at<T>(norm, as_values, i);
    store_as(y[i], norm.bias != nullptr ? value + weight_at<T>(norm.bias, as_values, i) : value);
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
  const bool as_values = norm.weights_as_x;
  const Acc mean = norm.layer_norm ? static_cast<const Acc*>(norm.mean)[row] : Acc(0);
  const Acc rstd = static_cast<const Acc*>(norm.rstd)[row];
  Acc sum_g = 0, sum_gx = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc g = rounded_product(gain_at<T>(norm, as_values, i), load_as<Acc>(dy[i]));
    sum_g += g;
    sum_gx += g * ((load_as<Acc>(x[i]) - mean) * rstd);
  }
  const Acc mean_gx = reduce_block(sum_gx, AddOp{}, shared) / Acc(n);
  const Acc mean_g = norm.layer_norm ? reduce_block(sum_g, AddOp{}, shared) / Acc(n) : Acc(0);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Acc xhat = (load_as<Acc>(x[i]) - mean) * rstd;
    Acc value = rstd * (rounded_product(gain_at<T>(norm, as_values, i), load_as<Acc>(dy[i])) -
                        mean_g - xhat * mean_gx);
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

// Threads for a row with `packs` packs per thread; 0: the row is too long.
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
  const unsigned together = std::max(1u, kForwardThreads / threads);
  const unsigned all = (rows + together - 1) / together;
  const unsigned blocks = norm.amax != nullptr ? std::min(all, kAmaxBlocks) : all;
  with_weight_type<T>(norm, [&](auto weight) {
    using W = decltype(weight);
    const bool few = threads <= kForwardThreads;
    const auto kernel = norm.layer_norm ? few ? norm_forward_packs<T, W, true, kForwardThreads>
                                              : norm_forward_packs<T, W, true, 1024>
                        : few ? norm_forward_packs<T, W, false, kForwardThreads>
                                        : norm_forward_packs<T, W, false, 1024>;
    kernel<<<blocks, dim3(threads, together), 0, stream>>>(norm);
  });
}

// False: the device has too little shared memory.
template <class T, class W, bool LayerNorm, bool Residual, int Packs>
bool backward_packs(const NormBackward& norm, unsigned threads, unsigned row_blocks,
                    cudaStream_t stream) {
  const auto kernel = norm_backward_packs<T, W, LayerNorm, Residual, Packs>;
  const size_t bytes = sizeof(Pack<T>) * threads * Packs * kBackwardRing * (Residual ? 3 : 2);
  if (!allow_shared_memory(kernel, bytes)) return false;
  kernel<<<row_blocks, threads, bytes, stream>>>(norm);
  return true;
}

template <class T, bool LayerNorm, bool Residual>
void backward(const NormBackward& norm, cudaStream_t stream) {
  const auto row_blocks =
      static_cast<unsigned>((norm.rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock);
  const bool alone = norm.columns / Pack<T>::kSize <= kPacksAlone;
  const unsigned threads =
      fits_packs<T>(norm.columns, {norm.x, norm.dy, norm.dx, norm.residual_grad, norm.gain,
                                   norm.dgain, norm.dbias})
          ? threads_for_packs<T>(norm.columns, alone ? 1 : 2)
          : 0;
  bool done = false;
  if (threads != 0) {
    with_weight_type<T>(norm, [&](auto weight) {
      using W = decltype(weight);
      done = alone
                 ? backward_packs<T, W, LayerNorm, Residual, 1>(norm, threads, row_blocks, stream)
                 : backward_packs<T, W, LayerNorm, Residual, 2>(norm, threads, row_blocks, stream);
    });
  }
  if (done) return;
  norm_input_grad_any<T>
      <<<static_cast<unsigned>(norm.rows), threads_for_row(norm.columns), 0, stream>>>(norm);
  const dim3 grid(static_cast<unsigned>((norm.columns + 127) / 128), row_blocks);
  norm_weight_grad_any<T><<<grid, 128, 0, stream>>>(norm);
}

}  // namespace

void norm_forward_cuda(const NormForward& norm, void* stream) {
  MEGATRON_ASSERT(norm.layer_norm || norm.bias == nullptr, "RMSNorm has no bias");
  with_cuda_type(norm.dtype, [&](auto type) { forward<decltype(type)>(norm, as_stream(stream)); });
  check_cuda(cudaGetLastError(), "norm forward");
}

void norm_backward_cuda(const NormBackward& norm, void* stream) {
  MEGATRON_ASSERT(norm.layer_norm || norm.dbias == nullptr, "RMSNorm has no bias");
  with_cuda_type(norm.dtype, [&](auto type) {
    using T = decltype(type);
    const bool residual = norm.residual_grad != nullptr;
    const auto run = norm.layer_norm ? residual ? backward<T, true, true> : backward<T, true, false>
                     : residual ? backward<T, false, true>
                                     : backward<T, false, false>;
    run(norm, as_stream(stream));
  });
  check_cuda(cudaGetLastError(), "norm backward");
}

}  // namespace megatron
