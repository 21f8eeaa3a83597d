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

// Operands of rows, as a scan takes them: [count, b, channels] as activations and [count, b, n] in
// fp32 (fp64).
struct RowOperands {
  at::Tensor rows, steps;
  RowOperands narrow(int64_t first, int64_t count) const;
};

// What decoding keeps of earlier positions: of those that count, without drafts that may not stand.
class RecurrentState final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override;
  void keep_as(const StateKeeping& keeping) override { keeping_ = keeping; }
  bool takes_back() const override { return true; }
  bool replays_chunks() const;  // in batch-invariant mode always
  // Memory as it is kept where the layer would keep `options`: rows before a convolution and those
  // of drafts, [slots, back + drafts, channels]; states, [slots, ...] of the shape of one.
  at::Tensor conv_rows(int64_t slots, int64_t back, int64_t channels,
                       const at::TensorOptions& options);
  at::Tensor states(int64_t slots, at::IntArrayRef shape, const at::TensorOptions& options);
  // Operands of rows behind the state, [slots, most, ...] each, such as `like`: of a chunk that is
  // replayed, and of drafts. Undefined if none are kept.
  RowOperands open_rows(int64_t slots, int64_t chunk, const RowOperands& like);

 private:
  StateKeeping keeping_;
  SlotBuffer conv_, states_, open_rows_, open_steps_;
};

// Bytes of RecurrentState of one sequence.
struct RecurrentStateSizes {
  int64_t conv_rows, conv_channels;   // without rows of drafts
  int64_t state;                      // elements
  int64_t chunk;                      // rows
  int64_t open_channels, open_steps;  // elements of a row
  int64_t bytes(const LayerShape& shape) const;
};

// y [count, b, width], and the state after the last row.
struct ScanOutput {
  at::Tensor y, state;
};
using RowScan = std::function<ScanOutput(const RowOperands& rows, const ScanState& initial)>;

// Decodes in whole chunks, each part of the batch by itself: its rows behind those of its
// sequence's open chunk. The state is that at the last border of a chunk before which no draft is.
//
//   rows     [t, 1, ...]
//   open     RecurrentState::open_rows()
//   states   [slots, ...], of shape and type of the states
//   scan     the rows of whole chunks and of the beginning of one, from the state before them
//   y        [t, 1, width], written
void replay_chunks(const RaggedBatch& batch, int64_t chunk, const RowOperands& rows,
                   const RowOperands& open, const at::Tensor& states, const RowScan& scan,
                   const at::Tensor& y);

// The rows of a ragged batch as sequences of equal length: parts of one token together, and each of
// the others, such as those with drafts and behind drafts that stood.
class DecodingSteps {
 public:
  struct Step {
    int64_t first, count, sequences;  // first row; rows of each sequence
    int64_t slot;                     // of the first sequence
    at::Tensor slots;                 // [sequences]
    at::Tensor begins;                // [sequences] bool: at position 0
    PartDrafts drafts;                // of a single sequence
    bool has_drafts() const { return drafts.drafts + drafts.stood > 0; }
    // [t, 1, ...] -> [count, sequences, ...], a view
    at::Tensor rows_of(const at::Tensor& x) const;
    // What was kept [slots, ...] of these sequences, [sequences, ...] in `type`; zero of those that
    // begin.
    at::Tensor states_of(const at::Tensor& kept, at::ScalarType type) const;
    void keep(const at::Tensor& states, const at::Tensor& kept) const;
  };
  DecodingSteps(const RaggedBatch& batch, at::Device device);
  const std::vector<Step>& all() const { return steps_; }
  // causal_conv() of u [t, 1, C] behind `kept`, RecurrentState::conv_rows(), which becomes that of
  // the rows that follow.
  void convolve(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& bias,
                const at::Tensor& kept, const at::Tensor& out) const;

 private:
  std::vector<Step> steps_;
};

// Of a step with has_drafts(): the state before its drafts is kept, and their rows behind it, for
// those of them that stand. `rows` and y [count, 1, ...] are those of the step.
void scan_drafts(const DecodingSteps::Step& step, const RowOperands& rows, const RowOperands& open,
                 const at::Tensor& states, const RowScan& scan, const at::Tensor& y);

}  // namespace megatron
