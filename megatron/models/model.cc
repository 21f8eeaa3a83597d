#include "megatron/models/model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

std::vector<Parameter*> EmbeddingTables::looked_up() const {
  std::vector<Parameter*> both;
  for (Parameter* table : {words, positions})
    if (table != nullptr) both.push_back(table);
  return both;
}

void EmbeddingTables::add_missing(const EmbeddingTables& of) {
  for (Parameter* EmbeddingTables::* table :
       {&EmbeddingTables::words, &EmbeddingTables::positions, &EmbeddingTables::encoder_distances,
        &EmbeddingTables::decoder_distances})
    if (this->*table == nullptr) this->*table = of.*table;
}

Model::Model(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice)
    : config_(config), groups_(groups), slice_(slice) {
  MEGATRON_CHECK(config.vocab_size > 0 && config.padded_vocab_size >= config.vocab_size,
                 "vocabulary of ", config.vocab_size, " tokens in ", config.padded_vocab_size,
                 " rows: expected at least one token and no fewer rows");
}

Batch Model::with_media_encoded(const Batch& batch, const ForwardContext&) { return batch; }

TensorFormats Model::border(int64_t, const Batch& batch, at::ScalarType dtype) const {
  return {rows_format(batch, nullptr, dtype)};
}

TensorFormat Model::rows_format(const Batch& batch, const UnpaddedRows* rows,
                                at::ScalarType dtype) const {
  const bool wide = config_.transformer.fp32_residual_connection && dtype != at::kDouble;
  const int64_t s = rows != nullptr ? rows->rows : batch.place.position.size(0),
                b = rows != nullptr ? 1 : batch.place.sample.size(0),
                ranks = config_.sequence_parallel ? groups_.tp.size() : 1;
  return {{s / ranks, b, config_.transformer.hidden_size}, wide ? at::kFloat : dtype};
}

StageTensors Model::begin_sequence(const SequenceInput& /*input*/, const StageTensors& /*before*/,
                                   DecodingState& /*state*/, int64_t /*slot*/,
                                   int64_t /*num_slots*/) {
  MEGATRON_ASSERT(false, "a model of type ", config_.type, " makes no state from an input");
  return {};
}

TensorFormats Model::sequence_border(int64_t, const SequenceInput&, at::ScalarType) const {
  return {};
}

at::Tensor Model::hidden(const at::Tensor& tokens, const at::Tensor& input,
                         const ForwardContext& context) {
  Batch batch;
  batch.set("tokens", tokens);
  return hidden(batch, input.defined() ? StageTensors{input} : StageTensors(), context).front();
}

at::Tensor Model::forward(const at::Tensor& tokens, const ForwardContext& context) {
  return logits(hidden(tokens, {}, context));
}

Loss Model::loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
                 const ForwardContext& context) {
  check_shape("labels", labels, {tokens.size(0), tokens.size(1)});
  Batch batch;
  batch.set("tokens", tokens);
  batch.set("labels", labels);
  batch.set("loss_mask", loss_mask);
  return loss(hidden(batch, {}, context), batch, context);
}

bool Model::outputs_hidden_states() const {
  return !slice_.head || config_.pipeline_vocab_parallel;
}

}  // namespace megatron
