// Keys and values of earlier positions, for decoding. Interface; implemented in inference/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace megatron {

class KVCache {
 public:
  virtual ~KVCache() = default;
  // Appends keys and values [s, b, g, d] of `layer_index` (from 0) and returns all keys and values
  // of that layer so far, [s_k, b, g, d] each. The caller advances the position after the last
  // layer.
  virtual std::pair<at::Tensor, at::Tensor> append(int64_t layer_index, const at::Tensor& k,
                                                   const at::Tensor& v) = 0;
  // Keys that are masked in addition to the causal mask (left padding of a batch), bool [b, 1, 1,
  // s_k], True = masked, for the s_k that append() returns; undefined: none.
  virtual at::Tensor padding_mask() const = 0;
};

}  // namespace megatron
