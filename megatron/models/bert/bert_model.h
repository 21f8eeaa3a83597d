// BERT: an encoder with attention in both directions, a loss of masked tokens and, over the first
// token, one of the order of two halves (sentence order prediction). Source: Devlin et al. 2018
// (arXiv:1810.04805); the order: Lan et al. 2019 (arXiv:1909.11942).
#pragma once

#include <memory>

#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

struct BertConfig : Config {
  bool bert_binary_head = true;  // token types and the second loss
  // Not a flag: positions of a sample that the loss counts at most; 0: not known
  int64_t most_counted = 0;
  void fields(FieldVisitor& visitor) override;
};

// Reads the columns of datasets/masked/bert_dataset.h.
//
//   x = E[text] + P[position] + Y[type]; layers; final norm: hidden states
//   logits = E norm(gelu(W x + b)) + c        loss: cross entropy of the masked tokens
//   order = V tanh(W' x_0 + b') + d           "sop loss": cross entropy of each sample
//
// Token types are there with the binary head only. Tokens attend to those of the padding mask; what
// others compute counts nowhere. The GELU of the head is the exact one whatever that of the MLP is.
// Logits are computed at masked positions only.
//
// Parameters: embedding.word_embeddings.weight, embedding.position_embeddings.weight, encoder...,
// lm_head.{dense, layer_norm}..., output_layer.bias, untied output_layer.weight; with the binary
// head embedding.tokentype_embeddings.weight, pooler.dense..., binary_head....
class BertModel : public Model {
 public:
  // `table` as for make_model(). Throws Error for what is not built.
  BertModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
            Parameter* table);
  ~BertModel() override;

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

  // The logits [b, 2] of the order of both halves, from the first row of this rank's hidden states;
  // class 1: swapped. Of use where that row is position 0. Last segment, with the binary head.
  at::Tensor order_logits(const at::Tensor& hidden);

 private:
  struct LMHead;
  struct BinaryHead;
  void add_order_loss(const at::Tensor& hidden, const Batch& batch, const ForwardContext& context);

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
