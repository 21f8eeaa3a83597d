// One contiguous gradient tensor and one contiguous value tensor for many parameters, in buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include "megatron/distributed/buffer_layout.h"
#include "megatron/nn/parameter.h"

namespace megatron {

// Gradients are fp32 (fp64 for fp64 models) and start as zero; values have the model's type. Both share their offsets; the
// gaps of the alignment stay zero.
class GradBuffer {
 public:
  // `parameters` in model order; they must outlive the buffer.
  GradBuffer(std::vector<Parameter*> parameters, at::ScalarType dtype, at::Device device,
             const BufferOptions& options);

  const BufferLayout& layout() const { return layout_; }
  const std::vector<Parameter*>& parameters() const { return parameters_; }  // model order, as layout().slots
  int index_of(const Parameter& parameter) const;  // in parameters(); -1: not in this buffer

  const at::Tensor& grads() const { return grads_; }    // [layout().num_elements]
  const at::Tensor& values() const { return values_; }  // [layout().num_elements]
  at::Tensor bucket_grads(int bucket) const;

  // A view of `flat` (grads, values or anything of their length) shaped like parameter `index`.
  at::Tensor view(const at::Tensor& flat, int index) const;

 private:
  std::vector<Parameter*> parameters_;
  std::unordered_map<const Parameter*, int> index_;
  BufferLayout layout_;
  at::Tensor grads_;
  at::Tensor values_;
};

}  // namespace megatron
