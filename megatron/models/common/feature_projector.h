// What makes rows of the language model of an encoder's features.
#pragma once

#include <memory>
#include <string_view>

#include "megatron/tensor_parallel/layers.h"

namespace megatron {

struct TransformerConfig;

struct ProjectorShape {
  int64_t inputs = 0;   // h_f
  int64_t middle = 0;   // m, of two linears; 0: the width of the language model
  bool affine = false;  // one linear
  bool bias = true;
  Activation activation = Activation::kGelu;  // between two linears
  bool input_norm = false;
  NormOptions norm = {};
  std::string_view module = {};  // "vision_projection."
};

// `language` with the adapters of that module's linears, linear_fc1 and linear_fc2, in place of its
// own.
TransformerConfig projector_adapters(const TransformerConfig& language, std::string_view module);

// mlp:    y = W2 act(W1 norm(x) + b1) + b2, W1 [m, h_f], W2 [h, m]
// affine: y = W norm(x) + b, W [h, h_f]
//
// Parameters: encoder.linear_fc1..., encoder.linear_fc2...; affine: encoder.... Norm and biases if
// the shape has them. The whole projector is on each rank. Communication: none.
class FeatureProjector : public Module {
 public:
  FeatureProjector(const ProjectorShape& shape, const TransformerConfig& language);
  // [N, h_f] -> [N, h]
  at::Tensor forward(const at::Tensor& features);

 private:
  const ProjectorShape shape_;
  const ParallelGroups alone_;
  std::unique_ptr<ColumnParallelLinear> linear_fc1_, linear_fc2_;  // null, affine: the first
};

}  // namespace megatron
