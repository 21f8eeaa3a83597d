#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

StageOutput forward_step(Model& model, const Batch& batch, const StageTensors& input,
                         const ForwardContext& context) {
  StageTensors hidden = model.hidden(batch, input, context);
  if (model.outputs_hidden_states()) return {std::move(hidden), {}, {}};
  return {{}, model.loss(hidden, batch, context), {}};
}

std::unique_ptr<VocabularyPass> begin_loss(Model& model, const Batch& batch,
                                           const at::Tensor& hidden) {
  return model.begin_loss(hidden, batch);
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
  task.model_provider = provide_gpt;
  task.datasets_provider = [](const Arguments& arguments, const DatasetRequest& request) {
    return build_train_valid_test_datasets(arguments.data, request);
  };
  task.forward_step = forward_step;
  task.begin_loss = begin_loss;
  task.model_flops = model_flops;
  return task;
}

}  // namespace megatron
