#include "megatron/models/common/output_layer.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"

namespace megatron {

OutputLayer::OutputLayer(const ModelConfig& config, const ParallelGroups& groups) {
  const ProcessGroup& ranks = config.pipeline_vocab_parallel ? groups.model_parallel : groups.tp;
  MEGATRON_CHECK(config.padded_vocab_size % ranks.size() == 0, "a vocabulary of ",
                 config.padded_vocab_size, " rows is not divisible by the ", ranks.size(),
                 " ranks that share it");
  weight_.local_shape = {config.padded_vocab_size / ranks.size(), config.transformer.hidden_size};
  weight_.global_shape = {config.padded_vocab_size, config.transformer.hidden_size};
  weight_.valid_rows = config.vocab_size;
  weight_.placement.shards = {
      {0, config.pipeline_vocab_parallel ? Axis::kModel : Axis::kTensor, {}}};
  weight_.init = config.transformer.weight_init(config.vocab_size, config.transformer.hidden_size);
  weight_.role = ParameterRole::kOutput;
  add("weight", &weight_);
}

OutputProjection::OutputProjection(const ModelConfig& config, const ParallelGroups& groups,
                                   const StageSlice& slice, LanguageModelEmbedding* embedding,
                                   Parameter* table) {
  const bool tied = !config.transformer.untie_embeddings_and_output_weights;
  MEGATRON_CHECK(
      !config.pipeline_vocab_parallel || !tied,
      "a tied output layer cannot be split over the stages: its table is that of the embedding");
  if (tied && !slice.head) return;
  if (!slice.head && !config.pipeline_vocab_parallel) return;
  if (!tied) {
    output_layer_ = std::make_unique<OutputLayer>(config, groups);
    table = &output_layer_->weight();
  } else {
    if (embedding != nullptr) table = &embedding->weight();
    if (table == nullptr) {
      tied_table_ = std::make_unique<TiedTable>(config, groups, slice);
      table = &tied_table_->weight();
    } else {
      ++table->uses;
    }
  }
  linear_ = std::make_unique<ColumnParallelLinear>(*table, config.sequence_parallel, groups);
}

ColumnParallelLinear& OutputProjection::linear() {
  MEGATRON_ASSERT(linear_ != nullptr, "this segment holds no output layer");
  return *linear_;
}

}  // namespace megatron
