// Compiled with --fmad=false so that random numbers are bit-equal to the CPU's.
#include "megatron/kernels/detail/cuda_types.cuh"
#include "megatron/kernels/detail/philox_math.h"
#include "megatron/kernels/philox.h"

namespace megatron {
namespace {

struct Words {
  uint32_t w[4];
};

__device__ __forceinline__ Words words_of_block(uint64_t key, uint64_t block, uint32_t c2,
                                                uint32_t c3) {
  Words words = {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), c2, c3}};
  philox_rounds(words.w[0], words.w[1], words.w[2], words.w[3], static_cast<uint32_t>(key),
                static_cast<uint32_t>(key >> 32));
  return words;
}

// One thread per Philox block (four random numbers) that overlaps the row.
template <class T>
__global__ void fill_kernel(RandomFill fill, int64_t blocks_per_row) {
  using Acc = AccumulateType<T>;
  T* out = static_cast<T*>(fill.out);
  const int64_t total = fill.rows * blocks_per_row, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < total; item += step) {
    const int64_t row = item / blocks_per_row;
    const int64_t start = (fill.first_row + row) * fill.row_elements + fill.column_offset;
    const int64_t block = start / 4 + item % blocks_per_row;
    const FillPlace place = fill_place(fill, row);
    const Words words =
        words_of_block(fill.key, place.base + static_cast<uint64_t>(block), place.c2, place.c3);
    float draw[4];
    if (fill.normal) {
      normal_pair(words.w[0], words.w[1], &draw[0], &draw[1]);
      normal_pair(words.w[2], words.w[3], &draw[2], &draw[3]);
    } else {
      for (int j = 0; j < 4; ++j) draw[j] = unit_uniform(words.w[j]);
    }
    for (int j = 0; j < 4; ++j) {
      const int64_t column = 4 * block + j - start;
      if (column < 0 || column >= fill.columns) continue;
      const Acc value =
          fill.normal ? static_cast<Acc>(fill.a) * draw[j]
                      : static_cast<Acc>(fill.a) + static_cast<Acc>(fill.b - fill.a) * draw[j];
      store_as(out[row * fill.columns + column], value);
    }
  }
}

template <class In, class Out, class Acc>
__global__ void dropout_kernel(Dropout d, uint64_t threshold, Acc scale, int64_t blocks_per_row) {
  const In* x = static_cast<const In*>(d.x);
  const Out* residual = static_cast<const Out*>(d.residual);
  Out* out = static_cast<Out*>(d.out);
  const int64_t total = d.sequence * d.batch * blocks_per_row,
                step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < total; item += step) {
    const int64_t row = item / blocks_per_row, block = item % blocks_per_row;
    const uint64_t sample = static_cast<uint64_t>(d.sample[d.sample_of_row ? row : row % d.batch]);
    const uint64_t base = static_cast<uint64_t>(d.position[row / d.batch]) << 32;
    const Words words =
        words_of_block(d.key, base + static_cast<uint64_t>(block), static_cast<uint32_t>(sample),
                       static_cast<uint32_t>(sample >> 32));
    for (int j = 0; j < 4 && 4 * block + j < d.features; ++j) {
      const int64_t at = row * d.features + 4 * block + j;
      Acc value = words.w[j] < threshold ? Acc(0) : load_as<Acc>(x[at]) * scale;
      if (residual != nullptr) value = load_as<Acc>(residual[at]) + value;
      store_as(out[at], value);
    }
  }
}

__global__ void attention_dropout_kernel(AttentionDropout d, uint64_t threshold, float scale) {
  const int64_t total = d.batch * d.heads * d.queries * d.keys,
                step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t item = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; item < total; item += step) {
    const int64_t row = item / d.keys;
    const uint64_t head = static_cast<uint64_t>(d.first_head + row / d.queries % d.heads);
    const uint64_t sample = static_cast<uint64_t>(d.sample[row / d.queries / d.heads]);
    const uint64_t base = static_cast<uint64_t>(d.query_position[row % d.queries]) << 32;
    const uint64_t key = static_cast<uint64_t>(d.key_position[item % d.keys]);
    const Words words =
        words_of_block(d.key, base + key / 4, static_cast<uint32_t>(sample),
                       static_cast<uint32_t>(sample >> 32) + (static_cast<uint32_t>(head) << 16));
    d.out[item] = words.w[key % 4] < threshold ? 0.0f : scale;
  }
}

}  // namespace

void fill_random_cuda(const RandomFill& fill, void* stream) {
  // a row may begin inside a Philox block
  const int64_t blocks_per_row = (fill.columns + 3) / 4 + 1;
  with_cuda_type(fill.dtype, [&](auto type) {
    fill_kernel<decltype(type)>
        <<<blocks_for(fill.rows * blocks_per_row), kThreads, 0, as_stream(stream)>>>(
            fill, blocks_per_row);
  });
  check_cuda(cudaGetLastError(), "random fill");
}

void dropout_cuda(const Dropout& d, void* stream) {
  const int64_t blocks_per_row = (d.features + 3) / 4;
  const unsigned blocks = blocks_for(d.sequence * d.batch * blocks_per_row);
  const double scale = 1.0 / (1.0 - d.p);
  with_cuda_type(d.x_dtype, [&](auto in) {
    with_cuda_type(d.out_dtype, [&](auto out) {
      using Acc = decltype(AccumulateType<decltype(in)>{} + AccumulateType<decltype(out)>{});
      dropout_kernel<decltype(in), decltype(out), Acc><<<blocks, kThreads, 0, as_stream(stream)>>>(
          d, drop_threshold(d.p), static_cast<Acc>(scale), blocks_per_row);
    });
  });
  check_cuda(cudaGetLastError(), "dropout");
}

void attention_dropout_cuda(const AttentionDropout& d, void* stream) {
  attention_dropout_kernel<<<blocks_for(d.batch * d.heads * d.queries * d.keys), kThreads, 0,
                             as_stream(stream)>>>(d, drop_threshold(d.p),
                                                  static_cast<float>(1.0 / (1.0 - d.p)));
  check_cuda(cudaGetLastError(), "attention dropout");
}

}  // namespace megatron
