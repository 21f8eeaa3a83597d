#include "megatron/training/arguments/layer_division.h"

#include "megatron/models/model_table.h"
#include "megatron/pipeline_parallel/cost_division.h"

namespace megatron {

bool names_layers_of_stages(const PipelineConfig& p) {
  return !p.pipeline_model_parallel_layout.empty() || p.decoder_first_pipeline_num_layers ||
         p.decoder_last_pipeline_num_layers || p.account_for_embedding_in_pipeline_split ||
         p.account_for_loss_in_pipeline_split || p.num_layers_per_virtual_pipeline_stage;
}

StageLayout divide_layers(const Arguments& arguments, const Vocabulary& vocabulary,
                          const ModelProvider& provider) {
  const PipelineConfig& pipeline = arguments.pipeline;
  const int64_t num_stages = arguments.parallel.pipeline_model_parallel_size;
  StageLayout even = make_stage_layout(pipeline, num_stages, arguments.transformer.num_layers);
  if (num_stages == 1 || names_layers_of_stages(pipeline)) return even;
  const std::unique_ptr<Model> model = whole_model(provider, arguments, vocabulary);
  const ModelConfig& config = model->config();
  LayerShape shape;
  shape.tokens = shape.rows = config.transformer.seq_length;
  const EndsCost ends =
      find_model_type(config.type).ends_cost(config, {shape, vocabulary.padded_size, 1});
  if (ends.first_stack == 0) return even;
  std::vector<double> costs;
  for (int64_t number = 1; number <= even.num_layers(); ++number)
    costs.push_back(model_layer_cost(config, number, shape, /*offloaded=*/false).products());
  std::vector<StageSlice> segments = even.segments();
  const std::vector<int64_t> counts =
      divide_by_cost(costs, ends.head_products, std::ssize(segments));
  int64_t next = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    segments[i].first_layer = next;
    segments[i].num_layers = counts[i];
    next += counts[i];
  }
  return {std::move(segments), static_cast<int>(num_stages),
          schedule_placement(pipeline.pipeline_schedule)};
}

}  // namespace megatron
