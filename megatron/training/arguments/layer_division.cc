#include "megatron/training/arguments/layer_division.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "megatron/models/model_table.h"
#include "megatron/pipeline_parallel/cost_division.h"
#include "megatron/pipeline_parallel/stage_division.h"

namespace megatron {
namespace {

std::vector<int64_t> counts_of_stacks(const std::vector<LayerCost>& layers, const EndsCost& ends,
                                      const StageLayout& even) {
  std::vector<double> costs;
  for (const LayerCost& layer : layers) costs.push_back(layer.products());
  return divide_by_cost(costs, ends.head_products, std::ssize(even.segments()));
}

// Seconds per token on an H100: operations at the rate that its GEMMs attain, the bytes of other
// kernels at that of its memory, in bf16.
double operations_time(double products) { return 2 * products / 620e12; }
double moving_time(double elements) { return 2 * elements / 3.0e12; }

double whole_time(const PassCosts& pass) {
  return pass.forward + pass.backward_input + pass.backward_weight;
}

// The embedding's rows are read, and their gradient is added to.
PassCosts embedding_time(const TransformerConfig& t) {
  const double rows = moving_time(2.0 * static_cast<double>(t.hidden_size));
  return {rows, rows, 0};
}

PassCosts head_time(const EndsCost& ends) {
  const double product = operations_time(ends.head_products);
  return {product, product, product};
}

StageLoads loads_of_letters(const Arguments& arguments, const std::vector<LayerCost>& layers,
                            const EndsCost& ends, const StageLayout& even) {
  const TransformerConfig& t = arguments.transformer;
  const bool full = t.recompute_granularity == RecomputeGranularity::kFull;
  // Of a parameter: its value, gradient, and three tensors of an optimizer in fp32.
  constexpr double kParameterBytes = 18;
  const double vocabulary = ends.head_products * kParameterBytes;
  StageLoads loads;
  for (const LayerCost& layer : layers)
    loads.layers.push_back({whole_time(layer_seconds(t, layer)),
                            layer.weight_products() * kParameterBytes,
                            static_cast<double>(full ? layer.stream : layer.saved().total())});
  loads.embedding = {whole_time(embedding_time(t)), vocabulary,
                     static_cast<double>(ends.embedding.saved)};
  loads.head = {whole_time(head_time(ends)), vocabulary, static_cast<double>(ends.head.saved)};
  // As many micro-batches as one-forward-one-backward holds.
  for (int stage = 0; stage < even.num_stages(); ++stage)
    loads.in_flight.push_back(static_cast<double>(even.num_stages() - stage));
  loads.chunks = even.num_chunks();
  loads.placement = schedule_placement(arguments.pipeline.pipeline_schedule);
  return loads;
}

// Times of the segments' passes, the longest forward being 1; every pass takes some.
std::vector<PassCosts> segment_times(const TransformerConfig& t, const StageLayout& stages,
                                     const std::vector<LayerCost>& layers, const EndsCost& ends) {
  const auto add = [](PassCosts& sum, const PassCosts& more) {
    sum.forward += more.forward;
    sum.backward_input += more.backward_input;
    sum.backward_weight += more.backward_weight;
  };
  std::vector<PassCosts> times;
  for (const StageSlice& segment : stages.segments()) {
    PassCosts& time = times.emplace_back(embedding_time(t));
    for (int64_t i = 0; i < segment.num_layers; ++i)
      add(time, layer_seconds(t, layers[static_cast<size_t>(segment.first_layer + i)]));
    if (segment.head) add(time, head_time(ends));
  }
  constexpr double kLeast = 1e-3;
  const double unit = std::ranges::max(times, {}, &PassCosts::forward).forward;
  for (PassCosts& time : times)
    time = {std::max(time.forward / unit, kLeast), std::max(time.backward_input / unit, kLeast),
            std::max(time.backward_weight / unit, kLeast)};
  return times;
}

StageLayout with_counts(const StageLayout& even, const std::vector<int64_t>& counts,
                        const PipelineConfig& pipeline) {
  std::vector<StageSlice> segments = even.segments();
  int64_t next = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    segments[i].first_layer = next;
    segments[i].num_layers = counts[i];
    next += counts[i];
  }
  return {std::move(segments), even.num_stages(), schedule_placement(pipeline.pipeline_schedule)};
}

}  // namespace

// What is computed again comes before the input gradient; other kernels move as much in both
// passes.
PassCosts work_seconds(double weights, double scores, double again, double moved) {
  const double w = operations_time(weights), s = operations_time(scores),
               m = moving_time(moved) / 2;
  return {w + s + m, w + 2 * s + operations_time(again) + m, w};
}

PassCosts layer_seconds(const TransformerConfig& t, const LayerCost& layer) {
  const bool full = t.recompute_granularity == RecomputeGranularity::kFull;
  return work_seconds(
      layer.weight_products(), layer.score_products(),
      full ? layer.products() : layer.first.recomputed_products + layer.second.recomputed_products,
      layer.first.moved_elements + layer.second.moved_elements);
}

bool names_layers_of_stages(const PipelineConfig& p) {
  return !p.hybrid_segments.empty() || !p.pipeline_model_parallel_layout.empty() ||
         p.decoder_first_pipeline_num_layers || p.decoder_last_pipeline_num_layers ||
         p.account_for_embedding_in_pipeline_split || p.account_for_loss_in_pipeline_split ||
         p.account_for_encoder_in_pipeline_split != 0 || p.num_layers_per_virtual_pipeline_stage;
}

StageLayout divide_layers(const Arguments& arguments, const Vocabulary& vocabulary,
                          const ModelProvider& provider) {
  const PipelineConfig& pipeline = arguments.pipeline;
  const int64_t num_stages = arguments.parallel.pipeline_model_parallel_size;
  StageLayout even = make_stage_layout(pipeline, num_stages, arguments.transformer.num_layers);
  const bool hybrid = arguments.transformer.is_hybrid(), named = names_layers_of_stages(pipeline);
  if (num_stages == 1 || (named && !hybrid)) return even;
  const std::unique_ptr<Model> model = whole_model(provider, arguments, vocabulary);
  const ModelConfig& config = model->config();
  LayerShape shape;
  shape.tokens = shape.rows = config.transformer.seq_length;
  const EndsCost ends =
      find_model_type(config.type).ends_cost(config, {shape, vocabulary.padded_size, 1});
  if (ends.first_stack == 0 && !hybrid) return even;
  std::vector<LayerCost> costs;
  for (int64_t number = 1; number <= even.num_layers(); ++number)
    costs.push_back(model_layer_cost(config, number, shape, /*offloaded=*/false));
  if (!hybrid) return with_counts(even, counts_of_stacks(costs, ends, even), pipeline);
  StageLayout stages =
      named ? even
            : with_counts(even, divide_over_stages(loads_of_letters(arguments, costs, ends, even)),
                          pipeline);
  stages.set_costs(segment_times(arguments.transformer, stages, costs, ends));
  return stages;
}

StageLayout layout_of_module(const StageLayout& language, bool encodes,
                             const PipelineConfig& config) {
  StageSlice encoder;
  encoder.num_parts = encoder.all_parts = 1;
  if (encodes) return {{encoder}, 1, ChunkPlacement::kLooped};
  std::vector<StageSlice> segments = language.segments();
  for (StageSlice& segment : segments) segment.first_part = segment.all_parts = 1;
  const int stages = language.num_stages();
  return {std::move(segments), stages,
          stages > 1 ? schedule_placement(config.pipeline_schedule) : ChunkPlacement::kLooped};
}

}  // namespace megatron
