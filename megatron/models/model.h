// What every model is, whatever its architecture. One object holds the whole model or the segment
// of it that one pipeline stage computes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/models/batch.h"
#include "megatron/models/own_config.h"
#include "megatron/nn/module.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/pipeline_parallel/stage_tensors.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {

class DecodingState;
struct ParallelGroups;

struct ModelConfig {
  std::string type = "gpt";  // a row of model_table.h
  TransformerConfig transformer;
  int64_t vocab_size = 0;         // of the tokenizer
  int64_t padded_vocab_size = 0;  // rows of the embedding; at least vocab_size
  bool sequence_parallel = false;
  // The output layer is also split over pipeline stages: each rank of groups.model_parallel holds
  // one part of the vocabulary. Untied output layers only.
  bool pipeline_vocab_parallel = false;
  OwnConfig own;  // flags of this type of models; none: their defaults
};

// A loss stays a (sum, weight) pair until one division by the weight of every micro-batch and rank.
struct Loss {
  at::Tensor sum;     // [] fp32 (fp64), differentiable
  at::Tensor weight;  // [] fp32 (fp64)
};

// One stage's part of the loss of one micro-batch when the vocabulary is split over the stages.
// Holds the autograd graph between loss() and backward(). The model must outlive it.
class VocabularyPass {
 public:
  virtual ~VocabularyPass() = default;
  // [3, s b] fp32 (fp64): softmax statistics of this rank's logits.
  virtual at::Tensor statistics() const = 0;
  // As Model::loss, from the gathered statistics of all parts, [parts, 3, s b]; not
  // differentiable.
  virtual Loss loss(const at::Tensor& all) = 0;
  // Accumulates the gradient of this part's weight and returns this part's summand of the gradient
  // of the hidden states. `factor`: gradient of Loss::sum. Call once, after loss().
  virtual at::Tensor backward(const at::Tensor& factor) = 0;
};

// What a sequence brings to be decoded besides tokens, on the device: ids or features of an
// encoder.
struct SequenceInput {
  at::Tensor ids;     // [n] int64; empty: none
  at::Tensor values;  // fp32, any shape; undefined: none
};
enum class SequenceInputUse : uint8_t { kNone, kOptional, kRequired };

// The tables that several segments may use; null: there is none.
struct EmbeddingTables {
  Parameter* words = nullptr;
  Parameter* positions = nullptr;  // learned ones
  // Of relative positions, of each stack of layers
  Parameter* encoder_distances = nullptr;
  Parameter* decoder_distances = nullptr;
  std::vector<Parameter*> looked_up() const;    // those of the embedding
  void add_missing(const EmbeddingTables& of);  // takes over what is null here
};

// Declares its parameters in the constructor; memory comes from a ParameterStore. The groups must
// outlive the model.
class Model : public Module {
 public:
  // What this segment gives: the tensors for the next one, or the hidden states that the loss is
  // computed from. Reads the columns of the batch that it needs. Differentiable in the parameters
  // and in `input`; with a tape in the context, blocks may be recomputed.
  //   input    from the previous segment, as border() says; empty for the segment with the
  //            embedding
  // Language models read tokens [b, s] and pass on one tensor, [s, b, h] ([s/t, b, h] with sequence
  // parallelism). With context parallelism s counts the tokens of this rank.
  virtual StageTensors hidden(const Batch& batch, const StageTensors& input,
                              const ForwardContext& context) = 0;
  // Of a whole model: the same micro-batch with what encoders of images and sounds make of these in
  // their place, differentiable. The shapes of what is left are those of samples, whatever media
  // they have: hidden() may be captured as a CUDA graph. Default: `batch`: there are no encoders.
  virtual Batch with_media_encoded(const Batch& batch, const ForwardContext& context);
  // The tensors that cross the border between two segments for a micro-batch: those that hidden()
  // returns before it and takes after it. `layers_before`: of the model's layers; below 0 of
  // encoders of media on segments of their own: -1 behind them, -1 - n where n letters V are left.
  // `dtype`: element type of the model. Both sides state the same, so it depends on nothing else.
  // Default: the one tensor of language models.
  virtual TensorFormats border(int64_t layers_before, const Batch& batch,
                               at::ScalarType dtype) const;
  // Last segment only: [s, b, h] -> [s, b, v/t] in the model's type; columns of vocabulary padding
  // are unspecified.
  virtual at::Tensor logits(const at::Tensor& hidden) = 0;
  // Cross entropy of each token, [s, b] fp32 (fp64), with the z-loss. labels [b, s] int64.
  virtual at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) = 0;
  // Last segment only, from its hidden(). Language models: sum of the per-token losses of the
  // column labels [b, s] int64 times the column loss_mask [b, s] fp32, and the sum of the mask. If
  // context.loss_grad is defined with --cross-entropy-fusion-impl linear, a backward must follow.
  virtual Loss loss(const StageTensors& hidden, const Batch& batch,
                    const ForwardContext& context) = 0;
  // Names of the losses that segments may add to ForwardContext::auxiliary_losses, in the order of
  // logs; the same on every segment.
  virtual std::vector<std::string> auxiliary_losses() const { return {}; }
  // With pipeline_vocab_parallel: this rank's part of the loss, on every stage. `hidden`: output of
  // the last segment. Records gradients if they are enabled.
  //
  // Communication: none between stages; over tp as logits() and its backward.
  virtual std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden,
                                                     const Batch& batch) = 0;
  virtual EmbeddingTables embedding_tables() = 0;  // of this segment

  // Decoding: whether sequences bring an input, and what this segment makes of one before the first
  // position of the sequence in `slot`: states of its layers, of fixed size. As with hidden(),
  // segments pass tensors on, in the formats that both sides of a border state; default: none.
  virtual SequenceInputUse sequence_input() const { return SequenceInputUse::kNone; }
  virtual StageTensors begin_sequence(const SequenceInput& input, const StageTensors& before,
                                      DecodingState& state, int64_t slot, int64_t num_slots);
  virtual TensorFormats sequence_border(int64_t layers_before, const SequenceInput& input,
                                        at::ScalarType dtype) const;

  // Language models, without a Batch: a segment; the whole model's logits or loss.
  at::Tensor hidden(const at::Tensor& tokens, const at::Tensor& input,
                    const ForwardContext& context);
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context);
  Loss loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
            const ForwardContext& context);

  const ModelConfig& config() const { return config_; }
  const StageSlice& slice() const { return slice_; }
  const ParallelGroups& groups() const { return groups_; }
  // True unless this segment computes the loss: its output goes to the next segment, or with
  // pipeline_vocab_parallel to begin_loss() of all stages.
  bool outputs_hidden_states() const;

 protected:
  // Of activations between layers, [s/t, b, h]; with rows without padding [R/t, 1, h].
  TensorFormat rows_format(const Batch& batch, const UnpaddedRows* rows,
                           at::ScalarType dtype) const;
  // Throws Error when the vocabulary does not fit its rows.
  Model(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice);

 private:
  const ModelConfig config_;
  const ParallelGroups& groups_;
  const StageSlice slice_;
};

}  // namespace megatron
