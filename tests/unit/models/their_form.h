#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/tensor/torch.h"

namespace megatron {

// The gradient of a Hugging Face tensor, assembled from the gradient of ours.
inline at::Tensor in_their_form(const HfTensor& tensor, const at::Tensor& whole) {
  if (has_expert_views(tensor)) {
    at::Tensor x = whole.reshape({whole.size(0), whole.size(1), -1});
    if (tensor.alternating)
      x = x.view({x.size(0), 2, x.size(1) / 2, x.size(2)}).transpose(1, 2).reshape(x.sizes());
    return (tensor.transposed ? x.transpose(1, 2) : x).reshape(tensor.shape);
  }
  const at::Tensor ours = tensor.expert < 0 ? whole : whole[tensor.expert];
  std::vector<int64_t> shape = ours.sizes().vec();
  shape[0] = 0;
  for (const RowRun& run : tensor.runs) shape[0] += run.count;
  at::Tensor theirs = at::empty(shape, ours.options());
  for (const RowRun& run : tensor.runs)
    theirs.narrow(0, run.theirs, run.count).copy_(ours.narrow(0, run.ours, run.count));
  return tensor.transposed ? theirs.t() : theirs;
}

}  // namespace megatron
