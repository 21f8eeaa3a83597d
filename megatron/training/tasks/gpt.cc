#include "megatron/models/model_table.h"
#include "megatron/reporting/flops.h"
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

}  // namespace

double model_flops_per_token(const ModelProvider& provider, const Arguments& arguments,
                             const Vocabulary& vocabulary) {
  // A type of models may have changed what the flags say.
  const ModelConfig config = whole_model(provider, arguments, vocabulary)->config();
  const TransformerConfig& c = config.transformer;
  LayerShape sample;
  sample.tokens = sample.rows = c.seq_length;
  double products = find_model_type(config.type)
                        .ends_cost(config, {sample, vocabulary.padded_size})
                        .head_products;
  for (int64_t layer = 1; layer <= c.num_layers; ++layer)
    products += reported_products(model_layer_cost(config, layer, sample, /*offloaded=*/false));
  return training_flops(products);
}

PretrainTask gpt_task(const Arguments&) {
  PretrainTask task;
  task.name = "gpt";
  task.model_provider = provide_model();
  task.datasets_provider = [](const Arguments& arguments, const DatasetRequest& request) {
    return build_train_valid_test_datasets(arguments.data, request);
  };
  task.forward_step = forward_step;
  task.begin_loss = begin_loss;
  task.flops_per_token = [provider = task.model_provider](const Arguments& arguments,
                                                          const Vocabulary& vocabulary) {
    return model_flops_per_token(provider, arguments, vocabulary);
  };
  return task;
}

const TaskType& gpt_task_type() {
  static const TaskType type = {"gpt", gpt_task};
  return type;
}

}  // namespace megatron
