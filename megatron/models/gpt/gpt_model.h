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
  // The output layer is divided over the stages, too: groups.model_parallel holds one part per
  // rank. Untied heads only.
  bool pipeline_vocab_parallel = false;
};

// A loss stays a (sum, weight) pair until one division by the weight of every micro-batch and rank.
struct Loss {
  at::Tensor sum;     // [] fp32 (fp64), differentiable
  at::Tensor weight;  // [] fp32 (fp64)
};

// What a stage computes of the loss of one micro-batch when the vocabulary is divided over the
// stages. Holds the graph between its two halves. The model must outlive it.
class VocabularyPass {
 public:
  virtual ~VocabularyPass() = default;
  // [3, s b] fp32 (fp64) of this rank's logits.
  virtual at::Tensor statistics() const = 0;
  // As GPTModel::loss, from the statistics of all parts, [parts, 3, s b]; not differentiable.
  virtual Loss loss(const at::Tensor& all) = 0;
  // Accumulates the gradient of the part's weight and returns the part's share of the gradient of
  // the hidden states, by `factor`, the gradient of Loss::sum. Once, after loss().
  virtual at::Tensor backward(const at::Tensor& factor) = 0;
};

// Parameters (contracts o): embedding.word_embeddings.weight, embedding.position_embeddings.weight,
// decoder.layers.N...., decoder.final_layernorm.weight|bias, output_layer.weight (untied).
class GPTModel : public Module {
 public:
  // Declares the parameters; memory comes from a ParameterStore. `groups` must outlive the model.
  // The whole model:
  GPTModel(const GPTConfig& config, const ParallelGroups& groups);
  // One segment. A tied head on another segment than the embedding holds a copy of the table,
  // shared over groups.embd, or uses `table` when this rank holds the embedding too (in another
  // chunk, which must outlive this one).
  GPTModel(const GPTConfig& config, const ParallelGroups& groups, const StageSlice& slice,
           Parameter* table = nullptr);
  ~GPTModel() override;

  // The hidden states after this segment. Differentiable in the parameters and in `input`; with a
  // tape in the context, blocks may be recomputed.
  //   tokens   [b, s] int64; read where the segment holds the embedding
  //   input    [s, b, h] of the segment before ([s/t, b, h] with sequence parallelism); undefined
  //            with the embedding
  //   return   as input
  // With context parallelism s counts the tokens of this rank.
  at::Tensor hidden(const at::Tensor& tokens, const at::Tensor& input,
                    const ForwardContext& context);
  // The last segment's part: [s, b, h] -> [s, b, v/t] in the model's type; columns of vocabulary
  // padding are unspecified.
  at::Tensor logits(const at::Tensor& hidden);
  // Cross entropy of each token, [s, b] fp32 (fp64), with the z-loss. labels [b, s] int64.
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels);
  // Sum of the per-token losses times their mask, and the sum of the mask. labels [b, s] int64,
  // loss_mask [b, s] fp32. `loss_grad` as in ForwardContext: with it and
  // --cross-entropy-fusion-impl linear a backward must follow.
  Loss loss(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& loss_mask,
            const at::Tensor& loss_grad);
  // This rank's part of it with pipeline_vocab_parallel, on every stage; `hidden` are those of the
  // last segment. With gradients where they are enabled.
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
  // Whether hidden states are what the segment gives: to the next one, or to begin_loss() of all
  // stages.
  bool outputs_hidden_states() const;
  const ParallelGroups& groups() const;
  Parameter* embedding_table();  // null where the segment has none

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Names and shapes, without rows of padding, of the parameters of the whole model, in its order.
using ParameterShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;
ParameterShapes parameter_shapes(const GPTConfig& config);

}  // namespace megatron
