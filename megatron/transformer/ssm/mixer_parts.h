// What recurrent sublayers share around their scans: parameters divided by heads, the convolution
// over the segments of a rank, and the rows of a batch that is decoded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "megatron/nn/parameter.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/layer_cost.h"
#include "megatron/transformer/layer/layer_state.h"
#include "megatron/transformer/ssm/segments.h"
#include "megatron/transformer/ssm/ssd_scan.h"

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

// Decoding can give the bits of a forward that is not for training; in batch-invariant mode of
// every one.
LastChunk last_chunk_of(const ForwardContext& pass);

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

// What decoding keeps of earlier positions.
class RecurrentState final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override;
  void keep_as(const StateKeeping& keeping) override { keeping_ = keeping; }
  bool replays_chunks() const;  // in batch-invariant mode always
  // Memory for rows [slots, ...] of the shape of one, as they are kept where the layer would keep
  // `options`.
  at::Tensor conv_rows(int64_t slots, at::IntArrayRef shape, const at::TensorOptions& options);
  at::Tensor states(int64_t slots, at::IntArrayRef shape, const at::TensorOptions& options);

  SlotBuffer conv;   // [slots, K - 1, channels]: rows before the convolution
  SlotBuffer heads;  // [slots, heads, ...]
  // With replays_chunks(): operands of the rows behind the last border of a chunk, [slots, chunk,
  // channels] as activations and [slots, chunk, n] in fp32 (fp64).
  SlotBuffer open_rows, open_steps;

 private:
  StateKeeping keeping_;
};

// Bytes of RecurrentState of one sequence.
struct RecurrentStateSizes {
  int64_t conv, state;                // elements
  int64_t chunk;                      // rows
  int64_t open_channels, open_steps;  // elements of a row
  int64_t bytes(const LayerShape& shape) const;
};

// Decodes in whole chunks, each part of the batch by itself: its rows behind those of its
// sequence's open chunk.
//
//   rows     [t, 1, channels], steps [t, 1, n]: what is kept of a row
//   states   [slots, ...], of shape and type of the states
//   scan     the rows of whole chunks and of the beginning of one, from the state before them
//   y        [t, 1, width], written
struct ChunkRows {
  at::Tensor rows, steps;  // [count, 1, ...]
};
struct ChunkResult {
  at::Tensor y, state;  // [count, 1, width]; [1, ...] after the last row
};
using ChunkScan = std::function<ChunkResult(const ChunkRows& rows, const ScanState& initial)>;
void replay_chunks(const RaggedBatch& batch, int64_t chunk, const ChunkRows& rows,
                   RecurrentState& state, const at::Tensor& states, const ChunkScan& scan,
                   const at::Tensor& y);

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
    // What was kept [slots, ...] of these sequences, [sequences, ...] in `type`; zero of those that
    // begin.
    at::Tensor states_of(const at::Tensor& kept, at::ScalarType type) const;
    void keep(const at::Tensor& states, const at::Tensor& kept) const;
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
