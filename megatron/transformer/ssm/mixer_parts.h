// What recurrent sublayers share around their scans: parameters divided by heads, the convolution
// over the segments of a rank, and the rows of a batch that is decoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "megatron/nn/parameter.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer_state.h"
#include "megatron/transformer/ssm/segments.h"

namespace megatron {

// Shapes and placement of a parameter whose rows are divided over t tensor-parallel ranks, in parts
// that are divided one by one.
void divide_over_heads(Parameter& parameter, int64_t t, std::vector<int64_t> global,
                       std::vector<int64_t> parts = {});

// Adds to the gradient of a parameter, and reports it. Does nothing for a frozen one.
void add_gradient(Parameter& parameter, const at::Tensor& grad);

// causal_conv() of every segment. `before`: Segments::rows_before(u). `bias` may be undefined.
at::Tensor conv_over_segments(const Segments& segments, const at::Tensor& u,
                              const std::vector<at::Tensor>& before, const at::Tensor& weight,
                              const at::Tensor& bias);
struct ConvParameterGrads {
  at::Tensor weight, bias;
};
// Writes the gradient of u into `du`.
//
// Communication: Segments::return_row_grads().
ConvParameterGrads conv_over_segments_backward(const Segments& segments, const at::Tensor& dy,
                                               const at::Tensor& u,
                                               const std::vector<at::Tensor>& before,
                                               const at::Tensor& weight, const at::Tensor& bias,
                                               const at::Tensor& du);

// What lies between the linears of such a sublayer.
struct MixerOutput {
  at::Tensor o;        // [s, b, width]
  at::Tensor y, rstd;  // of which norm_again() makes o
};

// The linears around it: in_proj with the input's norm, whose rows are `parts`, and out_proj from
// `width`. Layers count from 1.
LinearOptions in_proj_options(const TransformerConfig& config, int64_t layer_number,
                              bool sequence_parallel, std::vector<int64_t> parts);
LinearOptions out_proj_options(const TransformerConfig& config, int64_t layer_number,
                               bool sequence_parallel, int64_t width);

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
