#include "megatron/training/planning/layout_plan.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/nn/reduction.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {

namespace {

ElementBytes element_bytes(const Arguments& a) {
  ElementBytes bytes;
  bytes.model = a.optimizer.bf16 || a.optimizer.fp16 ? 2 : 4;
  bytes.residual = a.transformer.fp32_residual_connection ? 4 : bytes.model;
  return bytes;
}

DataSharding data_sharding(const Arguments& a, const Mesh& mesh) {
  DataSharding sharding;
  sharding.ranks = mesh.group_size(gradient_axes({}));
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

// Output rows of a linear that have adapters.
int64_t adapted_rows(const LoraOptions& lora, int64_t rows) {
  const auto& of_row = lora.adapter_of_row;
  if (of_row.empty()) return rows;
  return std::count_if(of_row.begin(), of_row.end(), [](int8_t adapter) { return adapter >= 0; });
}

// Lists the parameters of one segment with their names in the model.
class Lister {
 public:
  Lister(const LayoutPlan& plan, std::vector<PlannedParameter>& out)
      : plan_(plan), c_(plan.model()), out_(out) {}

  // Adds a parameter that is split over the tensor ranks.
  PlannedParameter& divided(std::string name, int64_t elements) {
    out_.push_back({std::move(name), elements / plan_.tensor, elements});
    out_.back().placement.shards = {{0, Axis::kTensor, {}}};
    return out_.back();
  }
  // Adds a parameter that is replicated on every tensor rank.
  void whole(std::string name, int64_t elements, bool partial) {
    out_.push_back({std::move(name), elements, elements});
    if (partial) out_.back().placement.partial_grad.insert(Axis::kTensor);
  }
  void norm(const std::string& name, int64_t size, bool partial) {
    whole(name + "weight", size, partial);
    if (c_.normalization == Normalization::kLayerNorm) whole(name + "bias", size, partial);
  }
  PlannedParameter& table() {
    return divided("embedding.word_embeddings.weight", plan_.padded_vocab_size * c_.hidden_size);
  }

  // Adds lora_A and lora_B of a linear with `rows` outputs and `k` inputs; see
  // tensor_parallel/lora_adapter.h.
  void column_adapter(const std::string& prefix, std::string_view linear, int64_t rows, int64_t k) {
    const LoraOptions lora = lora_options(c_, linear);
    if (lora.rank == 0) return;
    whole(cat(prefix, kLoraA), lora.adapters * lora.rank * k, true);
    divided(cat(prefix, kLoraB), adapted_rows(lora, rows) * lora.rank);
  }
  void row_adapter(const std::string& prefix, std::string_view linear, int64_t rows, int64_t k) {
    const LoraOptions lora = lora_options(c_, linear);
    if (lora.rank == 0) return;
    divided(cat(prefix, kLoraA), lora.rank * k);
    whole(cat(prefix, kLoraB), rows * lora.rank, true);
  }

  void layer(int64_t index) {
    const bool sp = plan_.sequence_parallel;
    const int64_t h = c_.hidden_size, heads = c_.num_attention_heads * c_.kv_channels;
    const int64_t qkv = heads + 2 * c_.query_groups() * c_.kv_channels;
    const int64_t fc1 = c_.ffn_hidden_size * (is_gated(c_.activation()) ? 2 : 1);
    const std::string attention = cat("decoder.layers.", index, ".self_attention."),
                      mlp = cat("decoder.layers.", index, ".mlp.");
    norm(attention + "linear_qkv.layer_norm_", h, sp);
    divided(attention + "linear_qkv.weight", qkv * h);
    if (c_.qkv_bias()) divided(attention + "linear_qkv.bias", qkv);
    column_adapter(attention + "linear_qkv.", "linear_qkv", qkv, h);
    if (c_.qk_layernorm) {  // gradients come from this rank's heads only
      norm(attention + "q_layernorm.", c_.kv_channels, true);
      norm(attention + "k_layernorm.", c_.kv_channels, true);
    }
    divided(attention + "linear_proj.weight", heads * h);
    if (c_.add_bias_linear) whole(attention + "linear_proj.bias", h, sp);
    row_adapter(attention + "linear_proj.", "linear_proj", h, heads);
    norm(mlp + "linear_fc1.layer_norm_", h, sp);
    divided(mlp + "linear_fc1.weight", fc1 * h);
    if (c_.add_bias_linear) divided(mlp + "linear_fc1.bias", fc1);
    column_adapter(mlp + "linear_fc1.", "linear_fc1", fc1, h);
    divided(mlp + "linear_fc2.weight", c_.ffn_hidden_size * h);
    if (c_.add_bias_linear) whole(mlp + "linear_fc2.bias", h, sp);
    row_adapter(mlp + "linear_fc2.", "linear_fc2", h, c_.ffn_hidden_size);
  }

  void segment(const StageSlice& slice) {
    if (slice.embedding) {
      table();
      if (c_.position_embedding_type == PositionEmbedding::kLearnedAbsolute)
        whole("embedding.position_embeddings.weight", c_.max_position_embeddings * c_.hidden_size,
              plan_.sequence_parallel);
    }
    for (int64_t i = 0; i < slice.num_layers; ++i) layer(slice.first_layer + i);
    if (slice.head) norm("decoder.final_layernorm.", c_.hidden_size, plan_.sequence_parallel);
    if (plan_.tied() || !(slice.head || plan_.splits_vocabulary())) return;
    PlannedParameter& output =
        divided("output_layer.weight", plan_.padded_vocab_size * c_.hidden_size);
    if (!plan_.splits_vocabulary()) return;
    output.stages = plan_.pipeline;
    output.placement.shards[0].axis = Axis::kModel;
    output.local_elements /= plan_.pipeline;
  }

 private:
  const LayoutPlan& plan_;
  const TransformerConfig& c_;
  std::vector<PlannedParameter>& out_;
};

int64_t adapter_elements(const TransformerConfig& c, std::string_view linear, int64_t rows,
                         int64_t k) {
  const LoraOptions lora = lora_options(c, linear);
  return lora.adapters * lora.rank * k + adapted_rows(lora, rows) * lora.rank;
}

// Marks tied tables: a stage with embedding and output layer uses the table twice; otherwise the
// stage of the output layer holds a copy.
void mark_table(const LayoutPlan& plan, const StageSlice& slice, Lister& lister,
                std::vector<PlannedParameter>& out) {
  const bool together = plan.stages.place_of_embedding().stage == plan.stages.place_of_head().stage;
  if (slice.embedding) (together ? out.front().used_twice : out.front().shared_over_stages) = true;
  if (slice.head && !together) {
    PlannedParameter& copy = lister.table();
    copy.shared_over_stages = copy.is_copy = true;
  }
}

}  // namespace

LayoutPlan make_layout_plan(const Arguments& arguments, int64_t padded_vocab_size, bool on_gpu) {
  LayoutPlan plan;
  plan.arguments = arguments;
  plan.padded_vocab_size = padded_vocab_size;
  plan.mesh = make_mesh(arguments.parallel, arguments.world_size);
  plan.tensor = arguments.parallel.tensor_model_parallel_size;
  plan.context = arguments.parallel.context_parallel_size;
  plan.pipeline = arguments.parallel.pipeline_model_parallel_size;
  plan.data = arguments.data_parallel_size();
  plan.num_microbatches = arguments.microbatches().num_microbatches(0);
  plan.sequence_parallel = arguments.parallel.sequence_parallel && plan.tensor > 1;
  plan.on_gpu = on_gpu;
  plan.bytes = element_bytes(arguments);
  plan.sharding = data_sharding(arguments, plan.mesh);
  plan.stages =
      make_stage_layout(arguments.pipeline, plan.pipeline, arguments.transformer.num_layers);
  plan.schedule = make_schedule(
      arguments.pipeline.pipeline_schedule,
      arguments.pipeline.shape(plan.pipeline, plan.stages.num_chunks(), plan.num_microbatches));
  plan.transfers = plan_transfers(plan.schedule);
  return plan;
}

std::vector<PlannedParameter> chunk_parameters(const LayoutPlan& plan, int stage, int chunk) {
  std::vector<PlannedParameter> out;
  Lister lister(plan, out);
  const StageSlice slice = plan.stages.slice(stage, chunk);
  lister.segment(slice);
  if (plan.tied()) mark_table(plan, slice, lister, out);
  const bool adapters_alone = plan.model().lora_rank > 0;
  for (PlannedParameter& p : out) {
    const bool adapter = is_lora_parameter(p.name);
    p.frozen = plan.arguments.training.freezes(p.name) || (adapters_alone && !adapter);
    p.hidden_matrix =
        adapter || (p.name.find(".linear_") != std::string::npos && p.name.ends_with(".weight"));
  }
  return out;
}

int64_t model_elements(const LayoutPlan& plan) {
  const TransformerConfig& c = plan.model();
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size, d = c.kv_channels;
  const int64_t per_norm = c.normalization == Normalization::kLayerNorm ? 2 : 1;
  const int64_t heads = c.num_attention_heads * d, qkv = heads + 2 * c.query_groups() * d;
  const int64_t fc1 = is_gated(c.activation()) ? 2 * f : f;
  int64_t layer = 2 * per_norm * h + qkv * h + heads * h + fc1 * h + f * h;
  if (c.qkv_bias()) layer += qkv;
  if (c.add_bias_linear) layer += h + fc1 + h;
  if (c.qk_layernorm) layer += 2 * per_norm * d;
  layer += adapter_elements(c, "linear_qkv", qkv, h) +
           adapter_elements(c, "linear_proj", h, heads) +
           adapter_elements(c, "linear_fc1", fc1, h) + adapter_elements(c, "linear_fc2", h, f);
  int64_t total =
      c.num_layers * layer + per_norm * h + plan.padded_vocab_size * h * (plan.tied() ? 1 : 2);
  if (c.position_embedding_type == PositionEmbedding::kLearnedAbsolute)
    total += c.max_position_embeddings * h;
  return total;
}

BufferLayout chunk_buffer(const LayoutPlan& plan, const std::vector<PlannedParameter>& parameters) {
  const DistributedDataParallelConfig& ddp = plan.arguments.ddp;
  const DataSharding& sharding = plan.sharding;
  std::vector<BufferParameter> sizes;
  std::vector<std::string> names;
  for (const PlannedParameter& p : parameters) names.push_back(p.name);
  const std::vector<int> units = sharding_units(names);
  const bool whole_matrices = update_rule(plan.arguments.optimizer).needs_whole_matrices();
  int64_t trained = 0;
  for (const PlannedParameter& p : parameters) {
    sizes.push_back({p.local_elements, p.used_twice || p.shared_over_stages,
                     sharding.values ? units[sizes.size()] : 0, p.frozen,
                     p.name.starts_with("embedding."),
                     whole_matrices && !p.frozen && p.hidden_matrix});
    if (!p.frozen) trained += p.local_elements;
  }
  BufferOptions options;
  options.num_shards = sharding.shards;
  options.shard_alignment = ddp.ddp_pad_buckets_for_high_nccl_busbw ? 65536 : 128;
  if (sharding.ranks > 1 && !sharding.values) {
    if (ddp.ddp_bucket_size)
      options.bucket_size = *ddp.ddp_bucket_size;
    else if (ddp.ddp_num_buckets)
      options.bucket_size = (trained + *ddp.ddp_num_buckets - 1) / *ddp.ddp_num_buckets;
    else if (sharding.gradients || ddp.overlap_grad_reduce)
      options.bucket_size = std::max<int64_t>(40'000'000, int64_t{1'000'000} * sharding.ranks);
  }
  return plan_buffer(sizes, options);
}

}  // namespace megatron
