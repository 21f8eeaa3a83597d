// T5: an encoder with attention in both directions, and a decoder that also attends to the
// encoder's output and predicts the next token. Source: Raffel et al. 2020 (arXiv:1910.10683).
#pragma once

#include <memory>

#include "megatron/models/common/ends_cost.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/transformer/attention/relative_positions.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {

// Reads the columns of datasets/masked/t5_dataset.h.
//
//   e = E[text_enc] + P[position]; encoder layers; norm
//   x = E[text_dec] + P[position]; decoder layers, which attend to e; norm: hidden states
//   logits = E x + c, tied, or W x, untied      loss: cross entropy of the next token
//
// Both sides use the same tables. With relative positions there is no P: the self-attention of each
// stack adds numbers of the stack's own table to its scores, and cross attention has no positions.
// Nobody attends to tokens of which the masks say that they are
// padding; what these compute counts nowhere.
//
// Parameters: embedding.word_embeddings.weight, embedding.position_embeddings.weight (learned
// positions), {encoder,decoder}_relative_pos_emb.relative_attention_bias.weight (relative ones),
// encoder..., decoder..., lm_head.output_layer.bias (tied) or .weight (untied). The layers of the
// two stacks are numbered apart.
//
// Of samples without padding (Batch::rows_of) rows are those of the texts, [R, 1, h] of each stack
// in the place of [s, b, h].
//
// With c context ranks both sequences are in zig-zag parts of s_e/c and s_d/c tokens; the masks are
// those of the whole sequences. Communication over cp: that of attention, and the decoder's loss
// mask is gathered, once for each micro-batch.
//
// Borders between segments: within the encoder its rows [s_e/(c t), b, h]; behind it its output,
// and within the decoder also the decoder's rows [s_d/(c t), b, h]. The gradient of the encoder's
// output adds up along the decoder's segments. The decoder's embedding goes with its first layer,
// the encoder's norm with its last one; the word table has homes on the stages of both embeddings
// and, tied, of the head, a table of relative positions on every stage with a layer of its stack.
//
// Of an encoder alone (t5_encoder_only) its output is the hidden states; it has no loss.
class T5Model : public Model {
 public:
  // `tables` as for make_model(). Throws Error for what is not built.
  T5Model(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
          const EmbeddingTables& tables);
  ~T5Model() override;

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& input,
                      const ForwardContext& context) override;
  TensorFormats border(int64_t layers_before, const Batch& batch,
                       at::ScalarType dtype) const override;
  at::Tensor logits(const at::Tensor& hidden) override;
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor& labels) override;
  // The same; `hits` [s_d, b], unless null: 1 where the label has the largest logit.
  at::Tensor token_losses_and_hits(const at::Tensor& hidden, const at::Tensor& labels,
                                   at::Tensor* hits);
  Loss loss(const StageTensors& hidden, const Batch& batch, const ForwardContext& context) override;
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor& hidden, const Batch& batch) override;
  EmbeddingTables embedding_tables() override;
  // Of a model on one segment: the encoder's output, [s_e, b, h], from its columns alone.
  at::Tensor encoded(const Batch& batch, const ForwardContext& context);

  // Decoding: the ids of a sequence's input go through the encoder once, at most seq_length, and
  // its rows, later its output, from segment to segment. Then segments of the encoder pass on the
  // decoder's tokens, [1, t] int64, those of the decoder its rows alone.
  SequenceInputUse sequence_input() const override {
    return own_.t5_encoder_only ? SequenceInputUse::kNone : SequenceInputUse::kRequired;
  }
  StageTensors begin_sequence(const SequenceInput& input, const StageTensors& before,
                              DecodingState& state, int64_t slot, int64_t num_slots) override;
  TensorFormats sequence_border(int64_t layers_before, const SequenceInput& input,
                                at::ScalarType dtype) const override;

 private:
  bool starts_decoder() const { return decoder_ != nullptr && first_of_decoder_ == 0; }
  void make_embedding(const EmbeddingTables& tables);
  void make_distances(const EmbeddingTables& tables);
  void make_output(const EmbeddingTables& tables);
  // The stages with a home of a table; null: there is one.
  const ProcessGroup* homes(Parameter* EmbeddingTables::* table) const;
  void make_groups_of_homes() const;
  ForwardContext encoder_context(const Batch& batch, const ForwardContext& given) const;
  ForwardContext decoder_context(const Batch& batch, const ForwardContext& given) const;
  StageTensors decode(const Batch& batch, const StageTensors& input, const ForwardContext& given);
  at::Tensor encode(const Batch& batch, const StageTensors& input, const ForwardContext& given);

  const T5Config own_;
  const T5Stacks stacks_;
  int64_t first_of_decoder_ = 0;  // layer of this segment
  std::unique_ptr<LanguageModelEmbedding> embedding_;
  std::unique_ptr<TransformerBlock> encoder_, decoder_;  // null: none of its layers
  // Null: no layers of the stack, or no relative positions
  std::unique_ptr<RelativePositions> encoder_distances_, decoder_distances_;
  std::unique_ptr<OutputProjection> output_;
  std::unique_ptr<Parameter> head_bias_;  // null: the output layer is untied, or elsewhere
};

// A column of the decoder, [b, s_d]; without padding that of its rows, [1, R].
at::Tensor t5_decoder_column(const Batch& batch, const char* column);

// Columns of model_table.h.
EndsCost t5_ends_cost(const ModelConfig& config, const EndsShape& shape);
LayerCost t5_layer_cost(const ModelConfig& config, int64_t layer_number, const LayerShape& shape,
                        bool offloaded);

}  // namespace megatron
