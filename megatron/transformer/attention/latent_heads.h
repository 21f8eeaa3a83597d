// Queries, keys and values of multi-latent attention from its projections.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/transformer/layer/layer.h"

namespace megatron {

// Features of a head: of queries and keys those that are not rotated and those that are; of values.
struct LatentHeadSizes {
  int64_t heads = 1;  // n, on this rank
  int64_t plain = 0, rotated = 0, value = 0;
  int64_t query() const { return plain + rotated; }
};

struct LatentHeads {
  at::Tensor q, k;  // [s, b, n, plain + rotated]: [features as they are | rotated]
  at::Tensor v;     // [s, b, n, value]
};

// Differentiable in the three projections.
//
//   q       [s, b, n * (plain + rotated)]   per head [plain | rotated]
//   kv      [s, b, n * (plain + value)]     per head [key | value]
//   shared  [s, b, rotated]                 the rotated features of every head's key
//
// All results are contiguous and of their own memory; the backward saves nothing of the inputs.
LatentHeads latent_heads(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& shared,
                         const LatentHeadSizes& sizes, const RotaryTables& rotary);

// The rotation alone: neighbouring pairs are sorted into halves, [x0 x2 .. | x1 x3 ..], and rotated
// as halves; the result stays in that order. x [s, b, n, rotated]; not differentiable.
at::Tensor rotate_pairs(const at::Tensor& x, const RotaryTables& rotary);

}  // namespace megatron
