// Where attention finds the keys and values of earlier positions while it decodes. Implemented by
// inference/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace megatron {

class KVCache {
 public:
  virtual ~KVCache() = default;
  // Appends keys and values [s, b, g, d] of `layer_index` (from 0) and returns all of that layer so
  // far, [s_k, b, g, d] each. Positions advance after the last layer, by the caller.
  virtual std::pair<at::Tensor, at::Tensor> append(int64_t layer_index, const at::Tensor& k,
                                                   const at::Tensor& v) = 0;
  // Which keys each row may not see beyond causality (left padding of a batch), bool [b, 1, 1, s_k]
  // for the s_k that append() returns, or undefined.
  virtual at::Tensor padding_mask() const = 0;
};

}  // namespace megatron
