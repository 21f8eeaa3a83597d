// Decoder-only transformer: embedding, blocks, final norm, output layer, loss.
#pragma once

#include <memory>

#include "megatron/models/model.h"

namespace megatron {

// Parameters, named as in Megatron's checkpoints: embedding.word_embeddings.weight,
// embedding.position_embeddings.weight, decoder.layers.N...., decoder.final_layernorm.weight|bias,
// mtp.layers.N...., output_layer.weight (untied).
class GPTModel : public Model {
 public:
  // The whole model, or one segment; `tables` as for make_model().
  GPTModel(const ModelConfig& config, const ParallelGroups& groups);
  GPTModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
           const EmbeddingTables& tables = {});
  ~GPTModel() override;

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  // The same, for a model that reads more than tokens: `more`, [s, b, h] of the whole sequences of
  // this rank, is added to the embedding before its dropout; undefined: nothing. Differentiable.
  StageTensors hidden_with(const Batch& batch, at::Tensor more, const StageTensors& input,
                           const ForwardContext& context);
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  std::vector<std::string> auxiliary_losses() const override;
  EmbeddingTables embedding_tables() override;

 private:
  // `mtp`: this segment has the layers of multi-token prediction.
  void make_embedding(bool mtp, Parameter* table);
  void make_mtp();
  // `context` as with_rows() returns it.
  at::Tensor embed(const at::Tensor& tokens, at::Tensor more, const ForwardContext& context);
  // What the output layer multiplies: hidden states over --logits-scaling, which takes h products
  // of a token, not one of each logit.
  at::Tensor scaled(const at::Tensor& hidden) const;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels, at::Tensor* hits);
  // The same; with --cross-entropy-fusion-impl linear and a known gradient without logits.
  // `weights` [s, b]: what the losses are multiplied by in their sum.
  at::Tensor trained_losses(const at::Tensor& hidden, const at::Tensor& labels,
                            const at::Tensor& weights, const ForwardContext& context,
                            at::Tensor* hits);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
