// Position-keyed random numbers: filling tensors, dropout, attention dropout. Bit-equal on CPU and
// CUDA.
//
// Philox4x32-10; the key is given, the counter of four consecutive elements is
//   fills      (block low, block high, 0, 0)           block = element index / 4
//   fills of activations, dropout
//              (feature / 4, position, sample low, sample high)
//   attention  (key position / 4, query position, sample low, sample high + head * 2^16)
// where samples are below 2^48, and element i takes word i % 4.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// The generator itself: words[4 * blocks] of counters (first_block + i as 64 bits, c2, c3).
void philox_words_cpu(uint64_t key, uint64_t first_block, uint32_t c2, uint32_t c3, int64_t blocks,
                      uint32_t* words);

struct RandomFill {
  bool normal = true;  // N(0, a^2), else uniform in [a, b)
  double a = 1.0;
  double b = 0.0;
  uint64_t key = 0;
  DType dtype = DType::kFloat32;
  void* out = nullptr;  // [rows, columns], assigned
  int64_t rows = 0;
  int64_t columns = 0;
  // Element (r, i) is random number (first_row + r) * row_elements + column_offset + i
  int64_t first_row = 0;
  int64_t row_elements = 0;
  int64_t column_offset = 0;
  // With places, the rows [s * b] are those of an activation, and the three above are 0.
  int64_t batch = 0;                  // b
  const int64_t* sample = nullptr;    // [b]
  const int64_t* position = nullptr;  // [s]
};
void fill_random_cpu(const RandomFill& fill, int64_t row_begin, int64_t row_end);
void fill_random_cuda(const RandomFill& fill, void* stream);

// out = residual + keep(position) * x / (1 - p); the backward is the same with x = dy and no
// residual. Sums in fp32 (fp64 if `out` or `x` is), rounded once.
struct Dropout {
  double p = 0.0;
  uint64_t key = 0;
  int64_t sequence = 0;               // s
  int64_t batch = 0;                  // b
  int64_t features = 0;               // h
  const int64_t* sample = nullptr;    // [b], or [s b] of each row
  bool sample_of_row = false;         // the latter
  const int64_t* position = nullptr;  // [s]
  DType x_dtype = DType::kFloat32;
  const void* x = nullptr;  // [s, b, h]
  DType out_dtype = DType::kFloat32;
  const void* residual = nullptr;  // [s, b, h] of out_dtype, or null
  void* out = nullptr;             // [s, b, h], assigned
};
void dropout_cpu(const Dropout& dropout, int64_t row_begin, int64_t row_end);  // rows of [s * b]
void dropout_cuda(const Dropout& dropout, void* stream);

// out[b, n, s, s_k] = 0 or 1 / (1 - p), fp32, assigned.
struct AttentionDropout {
  double p = 0.0;
  uint64_t key = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t first_head = 0;
  const int64_t* sample = nullptr;          // [b]
  const int64_t* query_position = nullptr;  // [s]
  const int64_t* key_position = nullptr;    // [s_k]
  float* out = nullptr;
};
// [b * n * s]
void attention_dropout_cpu(const AttentionDropout& dropout, int64_t row_begin, int64_t row_end);
void attention_dropout_cuda(const AttentionDropout& dropout, void* stream);

}  // namespace megatron
