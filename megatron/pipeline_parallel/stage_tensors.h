// What one segment of a model passes to the next one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace megatron {

// A short list; its order is part of what the model states about a border (Model::border in
// models/model.h). Language models send one tensor, [s, b, h].
using StageTensors = std::vector<at::Tensor>;

struct TensorFormat {
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool frozen = false;  // nothing is trained before it
  // Floating tensors have a gradient, which goes back in the same format.
  bool has_gradient() const { return at::isFloatingType(dtype) && !frozen; }
};
using TensorFormats = std::vector<TensorFormat>;

// Where tensors enter or leave a segment.
enum class Border {
  kInput,   // from the previous segment
  kOutput,  // to the next one
  kHidden,  // with the vocabulary split over the stages: from the last segment to all stages
};

}  // namespace megatron
