// Embedding lookup and its deterministic backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

//   weight [v, h], ids [...] int64 in [0, v) or negative (zero row); return [..., h]
at::Tensor embedding_forward(const at::Tensor& weight, const at::Tensor& ids);

// target[ids[i]] += dy[i] in fp32 (fp64), in a fixed order; negative ids are skipped.   target [v,
// h].
void embedding_backward(const at::Tensor& dy, const at::Tensor& ids, at::Tensor target);

}  // namespace megatron
