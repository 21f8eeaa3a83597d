// T5: an encoder with attention in both directions, and a decoder that also attends to the
// encoder's output and predicts the next token. Source: Raffel et al. 2020 (arXiv:1910.10683).
#pragma once

#include <memory>

#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// Reads the columns of datasets/masked/t5_dataset.h.
//
//   e = E[text_enc] + P[position]; encoder layers; norm
//   x = E[text_dec] + P[position]; decoder layers, which attend to e; norm: hidden states
//   logits = E x + c, tied, or W x, untied      loss: cross entropy of the next token
//
// Both sides use the same tables. Nobody attends to tokens of which the masks say that they are
// padding; what these compute counts nowhere.
//
// Parameters: embedding.word_embeddings.weight, embedding.position_embeddings.weight (learned
// positions), encoder..., decoder..., lm_head.output_layer.bias (tied) or .weight (untied). The
// layers of the two stacks are numbered apart.
class T5Model : public Model {
 public:
  // `table` as for make_model(). Throws Error for what is not built.
  T5Model(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
          Parameter* table);
  ~T5Model() override;

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  Parameter* embedding_table() override;

 private:
  ForwardContext encoder_context(const Batch& batch, const ForwardContext& given) const;
  ForwardContext decoder_context(const Batch& batch, const ForwardContext& given) const;

  const T5Stacks stacks_;
  LanguageModelEmbedding embedding_;
  TransformerBlock encoder_, decoder_;
  OutputProjection output_;
  std::unique_ptr<Parameter> head_bias_;  // null: the output layer is untied
};

// Columns of model_table.h.
EndsCost t5_ends_cost(const ModelConfig& config, const EndsShape& shape);
LayerCost t5_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                        bool offloaded);

}  // namespace megatron
