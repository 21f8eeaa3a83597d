#include "megatron/base/check.h"
#include "megatron/models/model_table.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

std::unique_ptr<Model> provide_model(const Arguments& arguments, const Vocabulary& vocabulary,
                                     const ParallelGroups& groups, const StageSlice& slice,
                                     const std::vector<Model*>& chunks) {
  ModelConfig config;
  config.transformer = arguments.transformer;
  config.vocab_size = vocabulary.size;
  config.padded_vocab_size = vocabulary.padded_size;
  config.sequence_parallel = arguments.parallel.sequence_parallel && groups.tp.size() > 1;
  config.pipeline_vocab_parallel = arguments.splits_vocabulary();
  Parameter* table = nullptr;  // of an embedding that this rank holds in another chunk
  for (Model* chunk : chunks)
    if (Parameter* found = chunk->embedding_table()) table = found;
  return make_model(config, groups, slice, table);
}

StageOutput forward_step(Model& model, const Batch& batch, const at::Tensor& input,
                         const ForwardContext& context) {
  const at::Tensor hidden = model.hidden(batch.tokens, input, context);
  if (model.outputs_hidden_states()) return {hidden, {}};
  return {{}, model.loss(hidden, batch.labels, batch.loss_mask, context.loss_grad)};
}

std::unique_ptr<VocabularyPass> begin_loss(Model& model, const Batch& batch,
                                           const at::Tensor& hidden) {
  return model.begin_loss(hidden, batch.labels, batch.loss_mask);
}

ModelFlops model_flops(const Arguments& arguments, const Vocabulary& vocabulary) {
  const TransformerConfig& c = arguments.transformer;
  ModelFlops flops;
  flops.num_layers = c.num_layers;
  flops.hidden_size = c.hidden_size;
  flops.ffn_hidden_size = c.ffn_hidden_size;
  flops.num_attention_heads = c.num_attention_heads;
  flops.num_query_groups = c.query_groups();
  flops.kv_channels = c.kv_channels;
  flops.padded_vocab_size = vocabulary.padded_size;
  flops.gated = c.swiglu;  // Megatron-LM counts a third matrix only for SwiGLU
  return flops;
}

}  // namespace

PretrainTask gpt_task(const Arguments&) {
  PretrainTask task;
  task.name = "gpt";
  task.model_provider = provide_model;
  task.datasets_provider = [](const Arguments& arguments, const DatasetRequest& request) {
    return build_train_valid_test_datasets(arguments.data, request);
  };
  task.forward_step = forward_step;
  task.begin_loss = begin_loss;
  task.model_flops = model_flops;
  return task;
}

}  // namespace megatron
