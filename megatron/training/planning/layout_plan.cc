#include "megatron/training/planning/layout_plan.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/comm/described_backend.h"
#include "megatron/comm/modules/encoder_ranks.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/reduction.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/pipeline_parallel/encoder_links.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/layer_division.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/arguments/padding_rules.h"

namespace megatron {

namespace {

ElementBytes element_bytes(const Arguments& a) {
  ElementBytes bytes;
  bytes.model = a.optimizer.bf16 || a.optimizer.fp16 ? 2 : 4;
  bytes.residual = a.transformer.fp32_residual_connection ? 4 : bytes.model;
  return bytes;
}

DataSharding data_sharding(const Arguments& a, const Mesh& mesh, const Placement& domain) {
  DataSharding sharding;
  sharding.ranks = mesh.group_size(gradient_axes(domain));
  const ShardingStrategy strategy = a.ddp.strategy();
  if (strategy == ShardingStrategy::kNoShard) return sharding;
  if (sharding.ranks % a.ddp.num_distributed_optimizer_instances != 0)
    throw UsageError(cat("--num-distributed-optimizer-instances ",
                         a.ddp.num_distributed_optimizer_instances, " does not divide the ",
                         sharding.ranks, " ranks that hold the same weights"));
  sharding.shards = sharding.ranks / a.ddp.num_distributed_optimizer_instances;
  sharding.gradients = sharding.shards > 1 && strategy >= ShardingStrategy::kOptimGrads;
  sharding.values = sharding.shards > 1 && strategy == ShardingStrategy::kOptimGradsParams;
  return sharding;
}

// The buffers of one chunk, as its store lays them out.
std::vector<PlannedBuffer> make_buffers(const LayoutPlan& plan, const ParallelGroups& groups,
                                        Module& chunk) {
  DistributedDataParallelConfig config = plan.arguments.ddp;
  config.whole_matrices = update_rule(plan.arguments.optimizer).needs_whole_matrices();
  std::vector<PlannedBuffer> buffers;
  for (const Placement& domain : reduction_domains(groups)) {
    buffers.push_back({domain, {}, {}, data_sharding(plan.arguments, plan.mesh, domain)});
  }
  for (Parameter* parameter : chunk.parameters())
    buffers.at(domain_of(parameter->placement, groups)).parameters.push_back(parameter);
  for (PlannedBuffer& buffer : buffers)
    buffer.layout =
        plan_buffer_of(buffer.parameters, static_cast<int>(buffer.sharding.shards),
                       static_cast<int>(buffer.sharding.replicas()), config, plan.bytes.model);
  return buffers;
}

std::shared_ptr<const PlannedStage> hold(const LayoutPlan& plan, int stage,
                                         const ModelProvider& provider) {
  const auto held = std::make_shared<PlannedStage>();
  held->groups = planned_groups(plan, plan.mesh.rank_at({Axis::kPipeline}, stage));
  std::vector<Model*> chunks;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    held->chunks.push_back(provider(plan.arguments, plan.vocabulary, held->groups,
                                    plan.stages.slice(stage, chunk), chunks));
    chunks.push_back(held->chunks.back().get());
    freeze_parameters(plan.arguments.training, *chunks.back());
  }
  for (Model* chunk : chunks) held->buffers.push_back(make_buffers(plan, held->groups, *chunk));
  return held;
}

}  // namespace

LayerShape LayoutPlan::layer_shape() const {
  LayerShape shape;
  shape.samples = arguments.training.micro_batch_size;
  shape.tokens = tokens();
  shape.rows = rows();
  shape.element = bytes.model;
  shape.residual = bytes.residual;
  shape.sum = bytes.sum;
  shape.tensor = tensor;
  shape.context = context;
  shape.expert = expert;
  shape.expert_load = expert_load;
  shape.expert_tensor = arguments.parallel.expert_tensor_size();
  shape.context_levels = arguments.parallel.hierarchical_context_parallel_sizes;
  shape.sequence_parallel = sequence_parallel;
  shape.documents =
      arguments.data.reset_attention_mask || arguments.data.dataloader_inter_document_masking;
  shape.document_rows = shape.documents && on_gpu && context == 1;
  shape.unpadded = unpadded_row_multiple(arguments) > 0;
  shape.on_gpu = on_gpu;
  return shape;
}

int64_t LayoutPlan::border_bytes(int64_t layers_before) const {
  if (layers_before < 0) {
    const EndsCost& media = segment_ends.empty() ? ends : segment_ends.front();
    return layers_before == -1 ? media.media_features : media.media_rows;
  }
  const auto of_length = [](int64_t length) { return at::empty({length}, at::kLong); };
  Batch batch;
  const int64_t samples = arguments.training.micro_batch_size;
  batch.place = {of_length(samples), of_length(tokens() / samples)};
  const at::ScalarType dtype = bytes.model == 2 ? at::kBFloat16 : at::kFloat;
  int64_t all = 0;
  for (const TensorFormat& one : held_by(0).chunks.front()->border(layers_before, batch, dtype)) {
    const auto elements =
        std::accumulate(one.shape.begin(), one.shape.end(), int64_t{1}, std::multiplies<>());
    all += elements * static_cast<int64_t>(at::elementSize(one.dtype));
  }
  return all;
}

int64_t LayoutPlan::transfer_bytes(int stage) const {
  int64_t most = 0;
  for (int chunk = 0; chunk < stages.num_chunks(); ++chunk) {
    const StageSlice segment = stages.slice(stage, chunk);
    if (!segment.starts()) most = std::max(most, border_bytes(segment.layers_before()));
    if (!segment.head) most = std::max(most, border_bytes(segment.layers_through()));
  }
  return most;
}

int64_t LayoutPlan::transfer_bytes() const {
  int64_t most = 0;
  for (int stage = 0; stage < stages.num_stages(); ++stage)
    most = std::max(most, transfer_bytes(stage));
  return most;
}

ModelConfig LayoutPlan::model_config() const {
  ModelConfig config = held_by(0).chunks.front()->config();
  config.transformer = model();
  return config;
}

void LayoutPlan::set_expert_load(double load) {
  expert_load = load;
  const ModelConfig config = model_config();
  const auto trains_one = [](const LayoutPlan& plan, std::string_view name) {
    return std::ranges::any_of(plan.held, [&](const auto& stage) {
      return std::ranges::any_of(stage->chunks, [&](const std::unique_ptr<Model>& chunk) {
        return std::ranges::any_of(chunk->parameters(), [&](const Parameter* p) {
          return p->trainable && p->name.starts_with(name);
        });
      });
    });
  };
  const auto trains = [&](std::string_view name) {
    return trains_one(*this, name) || (encoders != nullptr && trains_one(*encoders, name));
  };
  const auto ends_with = [&](const StageSlice* segment) {
    return find_model_type(config.type)
        .ends_cost(config, {layer_shape(), vocabulary.padded_size,
                            splits_vocabulary() ? pipeline : 1, trains, segment});
  };
  ends = ends_with(nullptr);
  segment_ends.clear();
  for (const StageSlice& segment : stages.segments())
    if (segment.all_parts > 0) segment_ends.push_back(ends_with(&segment));
}

LayerCost LayoutPlan::layer_cost(int64_t layer_number, bool offloaded) const {
  return model_layer_cost(model_config(), layer_number, layer_shape(), offloaded);
}

namespace {

// Sizes and the model's parts, of a plan that has mesh, layout and schedule.
void complete(LayoutPlan& plan, const ModelProvider& provider) {
  plan.bytes = element_bytes(plan.arguments);
  plan.sharding = data_sharding(plan.arguments, plan.mesh, {});
  for (int stage = 0; stage < static_cast<int>(plan.pipeline); ++stage)
    plan.held.push_back(hold(plan, stage, provider));
  const std::unique_ptr<Model> model = whole_model(provider, plan.arguments, plan.vocabulary);
  for (const Parameter* parameter : model->parameters())
    plan.model_elements += num_elements(*parameter);
  // A type of models may have changed what the flags say.
  plan.arguments.transformer = model->config().transformer;
  plan.set_expert_load(1.0);
}

// The ranks of the encoders' own beside those of `language`: micro-batches of all its replicas.
std::shared_ptr<LayoutPlan> plan_encoders(const LayoutPlan& language, const EncoderRanks& encoder,
                                          const ModelProvider& provider) {
  auto plan = std::make_shared<LayoutPlan>();
  plan->arguments = language.arguments;
  plan->arguments.parallel = {};
  plan->arguments.parallel.tensor_model_parallel_size = encoder.tensor;
  plan->arguments.training.micro_batch_size *= language.data;
  plan->arguments.world_size = encoder.count();
  plan->vocabulary = language.vocabulary;
  plan->mesh = make_mesh(plan->arguments.parallel, encoder.count());
  plan->tensor = encoder.tensor;
  plan->data = encoder.data;
  plan->num_microbatches = language.num_microbatches;
  plan->on_gpu = language.on_gpu;
  plan->stages = layout_of_module(language.stages, /*encodes=*/true, language.arguments.pipeline);
  plan->schedule = encoder_schedule(language.schedule);
  plan->transfers = {encoder_transfers(plan->schedule)};
  complete(*plan, provider);
  return plan;
}

}  // namespace

LayoutPlan make_layout_plan(const Arguments& arguments, const Vocabulary& vocabulary, bool on_gpu,
                            const ModelProvider& provider) {
  LayoutPlan plan;
  plan.arguments = arguments;
  plan.vocabulary = vocabulary;
  const EncoderRanks encoder = arguments.encoder_ranks();
  plan.mesh = make_mesh(arguments.parallel, encoder, arguments.world_size);
  plan.tensor = arguments.parallel.tensor_model_parallel_size;
  plan.context = arguments.parallel.context_parallel_size;
  plan.pipeline = arguments.parallel.pipeline_model_parallel_size;
  plan.data = arguments.data_parallel_size();
  plan.expert = arguments.parallel.expert_model_parallel_size;
  plan.num_microbatches = arguments.microbatches().num_microbatches(0);
  plan.sequence_parallel = arguments.parallel.sequence_parallel && plan.tensor > 1;
  plan.on_gpu = on_gpu;
  plan.stages = divide_layers(arguments, vocabulary, provider);
  plan.schedule = make_schedule(arguments.pipeline.pipeline_schedule,
                                arguments.pipeline.shape(plan.stages, plan.num_microbatches));
  plan.transfers = plan_transfers(plan.schedule);
  if (encoder.any()) {
    plan.encoders = plan_encoders(plan, encoder, provider);
    plan.stages = layout_of_module(plan.stages, /*encodes=*/false, arguments.pipeline);
  }
  complete(plan, provider);
  return plan;
}

ParallelGroups planned_groups(const LayoutPlan& plan, int rank) {
  return make_parallel_groups(plan.arguments.parallel,
                              described_backend(rank, plan.mesh.world_size()));
}

AxisSet stage_axes(const Placement& placement) {
  AxisSet axes = model_axes(placement);
  axes.erase(Axis::kPipeline);
  return axes;
}

int64_t stage_elements(const LayoutPlan& plan, int stage, const Parameter& parameter) {
  if (!counts_in_norm(parameter, plan.held_by(stage).groups)) return 0;
  return num_elements(parameter) * plan.mesh.group_size(stage_axes(parameter.placement)) /
         plan.mesh.group_size(copy_axes(parameter.placement));
}

}  // namespace megatron
