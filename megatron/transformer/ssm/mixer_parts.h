// What recurrent sublayers share around their scans: parameters divided by heads, the convolution
// over the segments of a rank, and the rows of a batch that is decoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "megatron/nn/parameter.h"
#include "megatron/transformer/layer/layer_state.h"
#include "megatron/transformer/ssm/segments.h"

namespace megatron {

// Shapes and placement of a parameter whose rows are divided over t tensor-parallel ranks, in parts
// that are divided one by one.
void divide_over_heads(Parameter& parameter, int64_t t, std::vector<int64_t> global,
                       std::vector<int64_t> parts = {});

// Adds to the gradient of a parameter, and reports it. Does nothing for a frozen one.
void add_gradient(Parameter& parameter, const at::Tensor& grad);

// causal_conv() of every segment. `before`: Segments::rows_before(u).
at::Tensor conv_over_segments(const Segments& segments, const at::Tensor& u,
                              const std::vector<at::Tensor>& before, const at::Tensor& weight);
// Writes the gradient of u into `du` and returns that of the weight.
//
// Communication: Segments::return_row_grads().
at::Tensor conv_over_segments_backward(const Segments& segments, const at::Tensor& dy,
                                       const at::Tensor& u, const std::vector<at::Tensor>& before,
                                       const at::Tensor& weight, const at::Tensor& du);

// The rows of a ragged batch as sequences of equal length: all parts of one token together, then
// each of the others.
class DecodingSteps {
 public:
  struct Step {
    int64_t first, count, sequences;  // first row; rows of each sequence
    at::Tensor slots;                 // [sequences]
    at::Tensor begins;                // [sequences] bool: at position 0
    // [t, 1, ...] -> [count, sequences, ...], a view
    at::Tensor rows_of(const at::Tensor& x) const;
    // What was kept [slots, ...] of these sequences, [sequences, ...]; zero of those that begin.
    at::Tensor states_of(const at::Tensor& kept) const;
  };
  DecodingSteps(const RaggedBatch& batch, at::Device device);
  const std::vector<Step>& all() const { return steps_; }
  // causal_conv() of u [t, 1, C] behind `kept` [slots, K - 1, C], which becomes that of the rows
  // that follow.
  void convolve(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                const at::Tensor& kept, const at::Tensor& out) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace megatron
