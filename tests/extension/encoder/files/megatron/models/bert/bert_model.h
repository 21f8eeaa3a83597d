// BERT: an encoder with attention in both directions, a loss of masked tokens and, over the first
// token, one of the order of two halves (sentence order prediction). Source: Devlin et al. 2018
// (arXiv:1810.04805); the order: Lan et al. 2019 (arXiv:1909.11942).
#pragma once

#include <memory>

#include "megatron/models/bert/dense.h"
#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

struct BertConfig : Config {
  bool bert_binary_head = true;  // token types and the second loss
  void fields(FieldVisitor& visitor) override;
};

// Reads the columns of datasets/masked_dataset.h.
//
//   x = E[token] + P[position] + Y[type]; layers; final norm: hidden states
//   logits = E norm(gelu(W x + b)) + c        loss: cross entropy of the masked tokens
//   order = V tanh(W' x_0 + b') + d           "sop loss": cross entropy of each sample
//
// A sample's order has the weight of its masked tokens, so that both losses are divided alike.
//
// Parameters: embedding.word_embeddings.weight, embedding.position_embeddings.weight, encoder...,
// lm_head.{dense, layer_norm}..., output_layer.bias; with the binary head
// embedding.tokentype_embeddings.weight, pooler.dense..., binary_head....
class BertModel : public Model {
 public:
  // `table` as for make_model(). Throws Error for what is not built.
  BertModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
            Parameter* table);

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::vector<std::string> auxiliary_losses() const override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  Parameter* embedding_table() override;

 private:
  struct LMHead;
  struct BinaryHead;
  void add_order_loss(const at::Tensor& first, const Batch& batch, const ForwardContext& context);

  std::unique_ptr<LanguageModelEmbedding> embedding_;
  std::unique_ptr<Embedding> token_types_;
  TransformerBlock encoder_;
  OutputProjection output_;
  std::unique_ptr<LMHead> lm_head_;
  std::unique_ptr<BinaryHead> binary_head_;
};

bool has_binary_head(const ModelConfig& config);

// A column of model_table.h.
EndsCost bert_ends_cost(const ModelConfig& config, const EndsShape& shape);

}  // namespace megatron
