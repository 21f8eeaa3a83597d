// Position-keyed random numbers: a function of position, not of history.
//
// Philox4x32-10. The key is a hash of (seed, purpose, layer); the counter is the position of the
// element:
//   activations              (sample ordinal, token position in the whole sequence, feature)
//   attention probabilities  (sample ordinal, head, query position, key position)
//   weights                  index of the element in the flattened global (unpadded) tensor
// Micro-batch size, data rank, context split and gradient accumulation do not appear, so they
// cannot change a random number.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace megatron {

// Identifies one stream of random numbers.
struct RandomKey {
  uint64_t value = 0;
};

// A hash of a counter: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t split_mix(uint64_t x);

// `layer` is the global layer number, counted from 1; 0 outside the layers.
RandomKey random_key(int64_t seed, std::string_view purpose, int64_t layer = 0);

// Where the elements of an activation [s, b, ...] lie. Tensors live on the activation's device.
struct TokenPositions {
  // [b] int64: consumed samples + index in the global batch; without padding (b = 1) that of each
  // row, [s] (attention/unpadded_rows.h)
  at::Tensor sample;
  at::Tensor position;  // [s] int64: token position in the whole sequence
};

// Zeroes elements with probability p and scales the rest by 1/(1-p). Differentiable. Samples may be
// those of each row.
//
//   x       [s, b, h], any floating type
//   return  [s, b, h]
at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, const TokenPositions& place);

// Dropout and addition: dropout(x) + residual, in the residual's type. Differentiable in both.
at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p, RandomKey key,
                       const TokenPositions& place);

// 0 or 1/(1-p) for each attention probability, fp32, not differentiable.
//
//   return  [b, n, s, s_k]; heads are numbered from first_head, keys by key_position [s_k]
at::Tensor attention_dropout_mask(int64_t num_heads, int64_t first_head, double p, RandomKey key,
                                  const TokenPositions& query, const at::Tensor& key_position);

// Fills `out` [rows, columns...] (contiguous, any floating type, any device) with N(0, std^2).
// Element i of row r is random number (first_row + r) * row_elements + i, where row_elements is the
// number of elements in a row of the GLOBAL tensor; `out` starts at column_offset in its rows.
void normal_(at::Tensor out, double std, RandomKey key, int64_t first_row, int64_t row_elements,
             int64_t column_offset);

// The same, uniform in [low, high).
void uniform_(at::Tensor out, double low, double high, RandomKey key, int64_t first_row,
              int64_t row_elements, int64_t column_offset);

// Fill an activation [s, b, ...] with numbers that belong to sample, position and feature.
void normal_(at::Tensor out, double std, RandomKey key, const TokenPositions& place);
void uniform_(at::Tensor out, double low, double high, RandomKey key, const TokenPositions& place);

}  // namespace megatron
