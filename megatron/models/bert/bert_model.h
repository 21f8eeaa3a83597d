// BERT: an encoder with attention in both directions, a loss of masked tokens and, over the first
// token, one of the order of two halves (sentence order prediction). Source: Devlin et al. 2018
// (arXiv:1810.04805); the order: Lan et al. 2019 (arXiv:1909.11942).
#pragma once

#include <memory>
#include <optional>

#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// What the pooler reads: the first token's hidden state, or the mean of those of a text.
enum class BertPooling { kFirst, kMean };

struct BertConfig : Config {
  bool bert_binary_head = true;             // pooler, binary head and the second loss
  std::optional<int64_t> bert_token_types;  // none: two with the binary head, else no table
  bool bert_lm_head = true;                 // the head and the loss of masked tokens
  bool bert_head_bias = true;               // of the linear of that head, and of bert_pooler_norm
  bool bert_pooler = false;                 // without the binary head, too
  bool bert_pooler_norm = false;            // the pooler is norm(gelu(W' x + b')), not a tanh
  BertPooling bert_pooling = BertPooling::kFirst;
  // Outputs of a classification head, in the place of the heads of pretraining; 0: there is none
  int64_t bert_classes = 0;
  // Choices of a question, each a sequence with one score of a multiple-choice head in the place of
  // the heads of pretraining; 0: there is none
  int64_t bert_choices = 0;
  bool bert_embedding_norm = false;
  int64_t bert_first_position = 0;  // row of the table of learned positions that position 0 has
  // Not a flag: positions of a sample that the loss counts at most; 0: not known
  int64_t most_counted = 0;
  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// Reads the columns of datasets/masked/bert_dataset.h; without "text" the column "tokens", and
// without "types" only types of 0.
//
//   x = E[text] + P[position] + Y[type], normed with bert_embedding_norm; layers; final norm:
//   hidden states
//   logits = E norm(gelu(W x + b)) + c        loss: cross entropy of the masked tokens
//   order = V tanh(W' x_0 + b') + d           "sop loss": cross entropy of each sample
//   classes = U drop(tanh(W' x_0 + b')) + e   with bert_classes, in the place of the heads above;
//                                             with bert_choices one number, the score of a choice
//
// With bert_pooler_norm it is norm(gelu(W' x + b')) in the place of tanh, with BertPooling::kMean
// the mean of the tokens of the padding mask in the place of x_0.
//
// Of samples without padding (Batch::rows_of) hidden states are those of the rows, [R, 1, h]
// ([R/t, 1, h]).
//
// Token types are there with the binary head, or where BertConfig says so. Tokens attend to those
// of the padding mask, those inside of a text that it leaves out to one another, and padding to
// padding. The GELU of the head is the exact one whatever that of the MLP is.
// Logits are computed at masked positions only.
//
// Parameters: embedding.word_embeddings.weight, embedding.position_embeddings.weight,
// embedding.norm..., encoder..., lm_head.{dense, layer_norm}..., output_layer.bias, untied
// output_layer.weight; with token types embedding.tokentype_embeddings.weight; with the binary head
// pooler.dense..., binary_head...; with classes pooler.dense..., classification_head..., with
// choices pooler.dense..., multichoice_head...; with bert_pooler_norm pooler.layer_norm.... With
// adapters they alone are trained, and beside them pooler and head of classes or choices.
class BertModel : public Model {
 public:
  // `tables` as for make_model(). Throws Error for what is not built.
  BertModel(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
            const EmbeddingTables& tables);
  ~BertModel() override;

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  TensorFormats border(int64_t layers_before, const Batch& batch,
                       at::ScalarType dtype) const override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::vector<std::string> auxiliary_losses() const override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  EmbeddingTables embedding_tables() override;

  // The pooler's output [b, h] of the first row of this rank's hidden states, of use where that row
  // is position 0; or of the mean of its rows, of which `text` [b, s] is not 0 in those that count,
  // undefined: all do. Last segment, with a pooler. With `rows` that of each sample's first row, of
  // use on the tensor rank that holds it, or of the mean of its rows.
  at::Tensor pooled(const at::Tensor& hidden, const at::Tensor& text = {},
                    const UnpaddedRows* rows = nullptr);
  // The logits [b, 2] of the order of both halves; class 1: swapped. As pooled(), with the binary
  // head.
  at::Tensor order_logits(const at::Tensor& hidden, const UnpaddedRows* rows = nullptr);
  // The logits [b, classes], or the scores [b, 1]; as pooled(), with a head of classes or of
  // choices. Dropout as `training` says, the context of samples with padding; null: none.
  at::Tensor class_logits(const at::Tensor& hidden, const at::Tensor& text,
                          const ForwardContext* training = nullptr,
                          const UnpaddedRows* rows = nullptr);

 private:
  struct LMHead;
  void add_order_loss(const at::Tensor& hidden, const Batch& batch, const ForwardContext& context);
  // The first rows [b] of the samples, counted from the first of the `count` rows of this rank, and
  // whether they are among them.
  at::Tensor own_first(const UnpaddedRows& rows, int64_t count) const;
  at::Tensor holds_first(const UnpaddedRows& rows, int64_t count) const;
  // Those rows of hidden states, [1, b, h], zeros where another rank holds them.
  at::Tensor first_rows(const at::Tensor& hidden, const UnpaddedRows& rows) const;

  std::unique_ptr<LanguageModelEmbedding> embedding_;
  std::unique_ptr<Embedding> token_types_;
  TransformerBlock encoder_;
  OutputProjection output_;
  std::unique_ptr<LMHead> lm_head_;
  std::unique_ptr<ColumnParallelLinear> pooler_, binary_head_, text_head_;
  std::unique_ptr<Norm> pooler_norm_;
};

bool has_lm_head(const ModelConfig& config);
bool has_binary_head(const ModelConfig& config);
bool has_pooler(const ModelConfig& config);
// Outputs of its classification head; 0: it has none, or is no BERT.
int64_t num_classes(const ModelConfig& config);
// Choices of a question whose scores the multiple-choice head tells; 0: it has none, or is no BERT.
int64_t num_choices(const ModelConfig& config);
// Outputs of the head of classes or of choices; 0: it has neither.
int64_t text_head_outputs(const ModelConfig& config);
// Rows of the table of token types; 0: there is none.
int64_t num_token_types(const ModelConfig& config);

// A column of model_table.h.
EndsCost bert_ends_cost(const ModelConfig& config, const EndsShape& shape);

}  // namespace megatron
