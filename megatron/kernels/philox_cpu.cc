#include <algorithm>

#include "megatron/kernels/detail/block_io.h"
#include "megatron/kernels/detail/philox_math.h"
#include "megatron/kernels/philox.h"

namespace megatron {
namespace {

constexpr int64_t kBlocksAtOnce = 16;  // two AVX2 registers per word
// Elements computed between two conversions; a multiple of 4 * kBlocksAtOnce
constexpr int64_t kRun = 512;

// words[4 i + j] = word j of block first + i, for kBlocksAtOnce blocks.
void philox_group(uint64_t key, uint64_t first, uint32_t c2, uint32_t c3, uint32_t* words) {
  uint32_t a[kBlocksAtOnce], b[kBlocksAtOnce], c[kBlocksAtOnce], d[kBlocksAtOnce];
  for (int64_t i = 0; i < kBlocksAtOnce; ++i) {
    const uint64_t block = first + static_cast<uint64_t>(i);
    a[i] = static_cast<uint32_t>(block);
    b[i] = static_cast<uint32_t>(block >> 32);
    c[i] = c2;
    d[i] = c3;
  }
  const uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int64_t i = 0; i < kBlocksAtOnce; ++i) philox_rounds(a[i], b[i], c[i], d[i], k0, k1);
  for (int64_t i = 0; i < kBlocksAtOnce; ++i) {
    words[4 * i] = a[i];
    words[4 * i + 1] = b[i];
    words[4 * i + 2] = c[i];
    words[4 * i + 3] = d[i];
  }
}

// The words of elements [first, first + n), n <= kRun, where element e is word e % 4 of block base
// + e / 4. Returns a pointer into `scratch`, which holds kRun + 4 * kBlocksAtOnce words.
const uint32_t* words_of(uint64_t key, uint64_t base, uint32_t c2, uint32_t c3, uint64_t first,
                         int64_t n, uint32_t* scratch) {
  const int64_t skip = static_cast<int64_t>(first % 4);
  const int64_t blocks = (skip + n + 3) / 4;
  for (int64_t i = 0; i < blocks; i += kBlocksAtOnce) {
    philox_group(key, base + first / 4 + static_cast<uint64_t>(i), c2, c3, scratch + 4 * i);
  }
  return scratch + skip;
}

// Normal random numbers from whole pairs: n is even.
void normals_from_words(const uint32_t* words, int64_t n, float* out) {
  for (int64_t i = 0; i < n / 2; ++i) {
    normal_pair(words[2 * i], words[2 * i + 1], &out[2 * i], &out[2 * i + 1]);
  }
}

template <class Acc>
void fill_row(const RandomFill& fill, int64_t row) {
  uint32_t scratch[kRun + 4 * kBlocksAtOnce];
  float normals[kRun + 4];
  Acc values[kRun];
  const uint64_t start =
      static_cast<uint64_t>((fill.first_row + row) * fill.row_elements + fill.column_offset);
  const FillPlace place = fill_place(fill, row);
  for (int64_t i = 0; i < fill.columns; i += kRun) {
    const int64_t n = std::min(kRun, fill.columns - i);
    const uint64_t first = start + static_cast<uint64_t>(i);
    const int64_t skip = static_cast<int64_t>(first % 2);
    Acc* out = output_run(fill.dtype, fill.out, row * fill.columns + i, values);
    const uint32_t* words = words_of(fill.key, place.base, place.c2, place.c3, first, n, scratch);
    if (fill.normal) {
      normals_from_words(words - skip, (skip + n + 1) / 2 * 2, normals);
      const Acc std = static_cast<Acc>(fill.a);
      for (int64_t j = 0; j < n; ++j) out[j] = std * normals[skip + j];
    } else {
      const Acc low = static_cast<Acc>(fill.a), width = static_cast<Acc>(fill.b - fill.a);
      for (int64_t j = 0; j < n; ++j) out[j] = low + width * unit_uniform(words[j]);
    }
    store_run(fill.dtype, fill.out, row * fill.columns + i, n, out);
  }
}

template <class Acc>
void dropout_row(const Dropout& d, int64_t row) {
  uint32_t scratch[kRun + 4 * kBlocksAtOnce];
  Acc x_run[kRun], residual_run[kRun], out_run[kRun];
  const uint64_t base = static_cast<uint64_t>(d.position[row / d.batch]) << 32;
  const uint64_t sample = static_cast<uint64_t>(d.sample[d.sample_of_row ? row : row % d.batch]);
  const uint64_t threshold = drop_threshold(d.p);
  const Acc scale = static_cast<Acc>(1.0 / (1.0 - d.p));
  for (int64_t i = 0; i < d.features; i += kRun) {
    const int64_t n = std::min(kRun, d.features - i), offset = row * d.features + i;
    const uint32_t* words =
        words_of(d.key, base, static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32),
                 static_cast<uint64_t>(i), n, scratch);
    const Acc* x = load_run(d.x_dtype, d.x, offset, n, x_run);
    Acc* out = output_run(d.out_dtype, d.out, offset, out_run);
    if (threshold > 0xffffffffu) {
      for (int64_t j = 0; j < n; ++j) out[j] = 0;
    } else {
      const uint32_t limit = static_cast<uint32_t>(threshold);
      for (int64_t j = 0; j < n; ++j) out[j] = words[j] < limit ? Acc(0) : x[j] * scale;
    }
    if (d.residual != nullptr) {
      const Acc* residual = load_run(d.out_dtype, d.residual, offset, n, residual_run);
      for (int64_t j = 0; j < n; ++j) out[j] = residual[j] + out[j];
    }
    store_run(d.out_dtype, d.out, offset, n, out);
  }
}

}  // namespace

void philox_words_cpu(uint64_t key, uint64_t first_block, uint32_t c2, uint32_t c3, int64_t blocks,
                      uint32_t* words) {
  uint32_t group[4 * kBlocksAtOnce];
  for (int64_t i = 0; i < blocks; i += kBlocksAtOnce) {
    philox_group(key, first_block + static_cast<uint64_t>(i), c2, c3, group);
    std::copy_n(group, 4 * std::min(kBlocksAtOnce, blocks - i), words + 4 * i);
  }
}

void fill_random_cpu(const RandomFill& fill, int64_t row_begin, int64_t row_end) {
  with_accumulator(fill.dtype, [&](auto acc) {
    for (int64_t row = row_begin; row < row_end; ++row) fill_row<decltype(acc)>(fill, row);
  });
}

void dropout_cpu(const Dropout& dropout, int64_t row_begin, int64_t row_end) {
  const bool wide = dropout.x_dtype == DType::kFloat64 || dropout.out_dtype == DType::kFloat64;
  with_accumulator(wide ? DType::kFloat64 : DType::kFloat32, [&](auto acc) {
    for (int64_t row = row_begin; row < row_end; ++row) dropout_row<decltype(acc)>(dropout, row);
  });
}

void attention_dropout_cpu(const AttentionDropout& d, int64_t row_begin, int64_t row_end) {
  const uint64_t threshold = drop_threshold(d.p);
  const float scale = static_cast<float>(1.0 / (1.0 - d.p));
  bool consecutive = true;
  for (int64_t i = 1; i < d.keys; ++i)
    consecutive &= d.key_position[i] == d.key_position[i - 1] + 1;
  uint32_t scratch[kRun + 4 * kBlocksAtOnce];
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t head = d.first_head + row / d.queries % d.heads;
    const uint64_t sample = static_cast<uint64_t>(d.sample[row / d.queries / d.heads]);
    const uint64_t base = static_cast<uint64_t>(d.query_position[row % d.queries]) << 32;
    const uint32_t c2 = static_cast<uint32_t>(sample);
    const uint32_t c3 = static_cast<uint32_t>(sample >> 32) + (static_cast<uint32_t>(head) << 16);
    float* out = d.out + row * d.keys;
    const int64_t step = consecutive ? kRun : 1;
    for (int64_t i = 0; i < d.keys; i += step) {
      const int64_t n = std::min(step, d.keys - i);
      const uint64_t first = static_cast<uint64_t>(d.key_position[i]);
      const uint32_t* words = words_of(d.key, base, c2, c3, first, n, scratch);
      for (int64_t j = 0; j < n; ++j) out[i + j] = words[j] < threshold ? 0.0f : scale;
    }
  }
}

}  // namespace megatron
