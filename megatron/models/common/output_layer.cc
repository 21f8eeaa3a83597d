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

}  // namespace megatron
