// Decoder-only transformer: embedding, blocks, final norm, output layer, loss. One object holds the
// whole model or the segment of it that one pipeline stage computes.
#pragma once

#include <memory>

#include "megatron/nn/module.h"
#include "megatron/nn/recompute.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {

struct ParallelGroups;

struct GPTConfig {
  TransformerConfig transformer;
  int64_t vocab_size = 0;         // of the tokenizer
  int64_t padded_vocab_size = 0;  // rows of the embedding; at least vocab_size
  bool sequence_parallel = false;
  // The output layer is also split over pipeline stages: each rank of groups.model_parallel holds
  // one part of the vocabulary. Untied output layers only.
  bool pipeline_vocab_parallel = false;
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
  // As GPTModel::loss, from the gathered statistics of all parts, [parts, 3, s b]; not
  // differentiable.
  virtual Loss loss(const at::Tensor& all) = 0;
  // Accumulates the gradient of this part's weight and returns this part's summand of the gradient
  // of the hidden states. `factor`: gradient of Loss::sum. Call once, after loss().
  virtual at::Tensor backward(const at::Tensor& factor) = 0;
};

// Parameters, named as in Megatron's checkpoints: embedding.word_embeddings.weight,
// embedding.position_embeddings.weight, decoder.layers.N...., decoder.final_layernorm.weight|bias,
// output_layer.weight (untied).
class GPTModel : public Module {
 public:
  // Declares the parameters; memory comes from a ParameterStore. `groups` must outlive the model.
  // The whole model:
  GPTModel(const GPTConfig& config, const ParallelGroups& groups);
  // One segment. A tied output layer on another segment than the embedding holds a copy of the
  // table, kept equal over groups.embd, or uses `table` if this rank holds the embedding in another
  // chunk (which must outlive this one).
  GPTModel(const GPTConfig& config, const ParallelGroups& groups, const StageSlice& slice,
           Parameter* table = nullptr);
  ~GPTModel() override;

  // The hidden states after this segment. Differentiable in the parameters and in `input`; with a
  // tape in the context, blocks may be recomputed.
  //   tokens   [b, s] int64; used only by the segment with the embedding
  //   input    [s, b, h] from the previous segment ([s/t, b, h] with sequence parallelism);
  //            undefined for the segment with the embedding
  //   return   as input
  // With context parallelism s counts the tokens of this rank.
  at::Tensor hidden(const at::Tensor& tokens, const at::Tensor& input,
                    const ForwardContext& context);
  // Last segment only: [s, b, h] -> [s, b, v/t] in the model's type; columns of vocabulary padding
  // are unspecified.
  at::Tensor logits(const at::Tensor& hidden);
  // Cross entropy of each token, [s, b] fp32 (fp64), with the z-loss. labels [b, s] int64.
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels);
  // Sum of the per-token losses times their mask, and the sum of the mask. labels [b, s] int64,
  // loss_mask [b, s] fp32. `loss_grad` as in ForwardContext: if it is defined with
  // --cross-entropy-fusion-impl linear, a backward must follow.
  Loss loss(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& loss_mask,
            const at::Tensor& loss_grad);
  // With pipeline_vocab_parallel: this rank's part of the loss, on every stage. `hidden`: output of
  // the last segment. Records gradients if they are enabled.
  //
  // Communication: none between stages; over tp as logits() and its backward.
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const at::Tensor& labels,
                                             const at::Tensor& loss_mask);

  // The whole model at once: logits, or the loss.
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context);
  Loss loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
            const ForwardContext& context);

  const GPTConfig& config() const;
  const StageSlice& slice() const;
  // True unless this segment computes the loss: its output goes to the next segment, or with
  // pipeline_vocab_parallel to begin_loss() of all stages.
  bool outputs_hidden_states() const;
  const ParallelGroups& groups() const;
  Parameter* embedding_table();  // null: not in this segment

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Names and shapes (without vocabulary padding) of the parameters of the whole model, in model
// order.
using ParameterShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;
ParameterShapes parameter_shapes(const GPTConfig& config);

}  // namespace megatron
