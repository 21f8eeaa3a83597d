// A GPT of which some layers also read, chunk by chunk, neighbours that were retrieved.
// Source: Borgeaud et al. 2022 (arXiv:2112.04426).
#pragma once

#include <memory>

#include "megatron/models/common/embedding.h"
#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/models/retro/first_retro_layer.h"

namespace megatron {

// Reads the columns of datasets/retro/retro_dataset.h; decoding, tokens and what
// ForwardContext::retrieved says of chunks.
//
//   x = E[tokens] + P[position]; layers, of which retro layers are
//       x += attention(norm(x)); x += chunked cross attention(norm(x)); x += mlp(norm(x))
//   e = E[neighbors] + P[position], encoded in the first retro layer (first_retro_layer.h)
//
// and norm, output layer and loss of a GPT. Parameters: those of a GPT; of retro layers also
// decoder.layers.N.pre_cross_attn_layernorm... and decoder.layers.N.cross_attention..., of the
// first one decoder.layers.N.cross_attention.encoder.layers.J....
//
// Borders between segments: the rows [s/t, b, h]; between the first and the last retro layer before
// them the encoded neighbours [r/t, k l b, h], whose gradient adds up along the segments. The
// tables of the embedding have homes on the stages of both embeddings and, tied, the words on that
// of the head.
class RetroModel : public Model {
 public:
  // `tables` as for make_model(). Throws Error for what is not built.
  RetroModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
             const EmbeddingTables& tables);
  ~RetroModel() override;

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  TensorFormats border(int64_t layers_before, const Batch& batch,
                       at::ScalarType dtype) const override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  EmbeddingTables embedding_tables() override;

 private:
  bool has_first() const { return first_ != nullptr; }
  // Whether neighbours are read behind a border.
  bool passes_encoded(int64_t layers_before) const;
  void make_embedding(const EmbeddingTables& tables);
  void make_output(const EmbeddingTables& tables);
  const ProcessGroup* homes(bool words) const;
  ForwardContext retrieved_context(const at::Tensor& neighbors, const ForwardContext& given) const;
  at::Tensor embed_neighbors(const at::Tensor& tokens, const ForwardContext& retrieved);
  at::Tensor decode(const Batch& batch, const ForwardContext& given);

  const RetroConfig own_;
  const RetroStacks stacks_;
  std::unique_ptr<LanguageModelEmbedding> embedding_;  // null: neither embedding is here
  // Layers before the first retro layer, it, and those after it; null: none of them
  std::unique_ptr<TransformerBlock> before_;
  std::unique_ptr<FirstRetroLayer> first_;
  std::unique_ptr<TransformerBlock> after_;
  std::unique_ptr<OutputProjection> output_;
};

// As LayerCostFunction, and the column of model_table.h.
LayerCost retro_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                           bool offloaded);
EndsCost retro_ends_cost(const ModelConfig& config, const EndsShape& shape);

}  // namespace megatron
