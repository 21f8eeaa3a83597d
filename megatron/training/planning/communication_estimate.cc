#include "megatron/training/planning/communication_estimate.h"

#include <algorithm>
#include <numeric>

#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/reduction.h"

namespace megatron {

namespace {

// Bytes sent in an all-gather or reduce-scatter of `bytes` in total.
double scatter(int64_t ranks, double bytes) {
  return static_cast<double>(ranks - 1) / static_cast<double>(ranks) * bytes;
}
double all_reduce(int64_t ranks, double bytes) { return 2 * scatter(ranks, bytes); }

struct Sizes {
  double product;  // T h e
  double queries;  // T N d e
  double keys;     // keys and values: 2 T G d e
  double mixed;    // output of linear_qkv, gathered for shared KV groups
  int64_t sharing;
  int64_t groups;  // G
};

Sizes sizes_of(const LayoutPlan& plan) {
  const TransformerConfig& c = plan.model();
  const double T = static_cast<double>(plan.tokens()), e = static_cast<double>(plan.bytes.model),
               d = static_cast<double>(c.kv_channels);
  const int64_t heads = c.num_attention_heads / plan.tensor;
  Sizes z{};
  z.groups = std::max<int64_t>(1, c.query_groups() / plan.tensor);
  z.sharing = std::max<int64_t>(1, plan.tensor / c.query_groups());
  z.product = T * static_cast<double>(c.hidden_size) * e;
  z.queries = T * static_cast<double>(heads) * d * e;
  z.keys = 2 * T * static_cast<double>(z.groups) * d * e;
  z.mixed = T * static_cast<double>(heads * z.sharing + 2 * z.groups) * d * e;
  return z;
}

// Layers of a chunk whose forward runs again in the backward.
int64_t recomputed_layers(const TransformerConfig& c, int64_t num_layers) {
  if (c.recompute_granularity != RecomputeGranularity::kFull) return 0;
  return c.recompute_method == RecomputeMethod::kBlock
             ? std::min(num_layers, c.recompute_num_layers)
             : num_layers;
}

// Recomputed units of a chunk, each with one saved input.
int64_t recomputed_units(const TransformerConfig& c, int64_t num_layers) {
  const int64_t layers = recomputed_layers(c, num_layers);
  const int64_t unit = c.recompute_method == RecomputeMethod::kUniform ? c.recompute_num_layers : 1;
  return (layers + unit - 1) / unit;
}

// Bytes that one micro-batch sends in one chunk.
struct PassTraffic {
  double forward = 0, backward = 0;
};

PassTraffic tensor_pass(const LayoutPlan& plan, const StageSlice& slice) {
  const int64_t t = plan.tensor;
  const Sizes z = sizes_of(plan);
  const double one_way = scatter(t, z.product), layers = static_cast<double>(slice.num_layers);
  const double shared = z.sharing > 1 ? scatter(z.sharing, z.mixed) : 0;
  const double forward = 4 * one_way + shared;
  const double stream =
      z.product / static_cast<double>(plan.bytes.model) * static_cast<double>(plan.bytes.residual);
  PassTraffic pass;
  pass.forward = layers * forward;
  pass.backward = layers * ((plan.sequence_parallel ? 6 : 4) * one_way + shared) +
                  static_cast<double>(recomputed_layers(plan.model(), slice.num_layers)) * forward +
                  (plan.model().recomputes("mlp") ? layers * 2 * one_way : 0.0);
  if (plan.model().distribute_saved_activations)
    pass.backward +=
        static_cast<double>(recomputed_units(plan.model(), slice.num_layers)) * scatter(t, stream);
  if (slice.embedding) {
    pass.forward += (plan.sequence_parallel ? 1 : 2) * one_way;
    pass.backward += plan.sequence_parallel ? one_way : 0;
  }
  if (slice.head || plan.splits_vocabulary()) {
    pass.forward += plan.sequence_parallel ? scatter(t, stream) : 0;
    pass.backward += plan.sequence_parallel ? scatter(t, stream) : 2 * one_way;
    if (!plan.splits_vocabulary())
      pass.forward += all_reduce(t, 3.0 * static_cast<double>(plan.tokens() * plan.bytes.sum));
  }
  return pass;
}

PassTraffic ring_or_gather(int64_t ranks, double keys, double widened, bool ring) {
  const double others = static_cast<double>(ranks - 1);
  return {others * keys,
          others * keys + (ring ? static_cast<double>(ranks) : others) * keys * widened};
}

PassTraffic context_layer(const LayoutPlan& plan, int64_t layer) {
  const TransformerConfig& c = plan.model();
  const Sizes z = sizes_of(plan);
  const ContextParallelType type = c.context_parallel_type(layer);
  const double widened =
      static_cast<double>(plan.bytes.sum) / static_cast<double>(plan.bytes.model);
  const bool again = c.recomputes("core_attn");
  const auto with_recomputation = [&](PassTraffic pass) {
    if (again) pass.backward += pass.forward;
    return pass;
  };
  if (type == ContextParallelType::kP2P)
    return with_recomputation(ring_or_gather(plan.context, z.keys, widened, true));
  if (type == ContextParallelType::kAllGather)
    return with_recomputation(ring_or_gather(plan.context, z.keys, widened, false));
  const bool nested = type == ContextParallelType::kA2AP2P;
  const int64_t inner =
      nested ? plan.arguments.parallel.hierarchical_context_parallel_sizes.at(0) : plan.context;
  // Keys are repeated until their heads are divisible by the inner ranks.
  const double keys =
      z.keys * static_cast<double>(std::lcm(z.groups, inner)) / static_cast<double>(z.groups);
  const double exchange = inner > 1 ? scatter(inner, 2 * z.queries + keys) : 0;
  PassTraffic pass{exchange, exchange};
  if (!nested) return pass;
  const PassTraffic ring = with_recomputation(
      ring_or_gather(plan.context / inner, inner > 1 ? keys : z.keys, widened, true));
  return {pass.forward + ring.forward, pass.backward + ring.backward};
}

PassTraffic context_pass(const LayoutPlan& plan, const StageSlice& slice) {
  PassTraffic pass;
  const int64_t again = recomputed_layers(plan.model(), slice.num_layers);
  for (int64_t i = 0; i < slice.num_layers; ++i) {
    const PassTraffic layer = context_layer(plan, slice.first_layer + i + 1);
    pass.forward += layer.forward;
    pass.backward += layer.backward + (i < again ? layer.forward : 0);
  }
  return pass;
}

PassTraffic pipeline_pass(const LayoutPlan& plan, int stage, int chunk) {
  const double bytes =
      static_cast<double>(plan.rows() * plan.model().hidden_size * plan.bytes.residual);
  const int segment = plan.schedule.segment(stage, chunk);
  const auto elsewhere = [&](int other) {
    return other >= 0 && other < plan.schedule.num_segments() &&
           plan.schedule.place(other).stage != stage;
  };
  return {elsewhere(segment + 1) ? bytes : 0, elsewhere(segment - 1) ? bytes : 0};
}

// Collectives over all stages when the vocabulary is split over them. In a ring broadcast every
// rank but the last sends.
PassTraffic vocabulary_pass(const LayoutPlan& plan, int stage) {
  const double hidden =
      static_cast<double>(plan.rows() * plan.model().hidden_size * plan.bytes.residual);
  const double statistics = 3.0 * static_cast<double>(plan.tokens() * plan.bytes.sum);
  const int64_t ranks = plan.tensor * plan.pipeline;
  return {(stage > 0 ? hidden : 0) + static_cast<double>(ranks - 1) * statistics,
          all_reduce(plan.pipeline, hidden)};
}

// Traffic of gradients and weights of one buffer over the data ranks.
GroupTraffic data_traffic(const LayoutPlan& plan, const PlannedBuffer& planned) {
  const BufferLayout& buffer = planned.layout;
  const DataSharding& sharding = planned.sharding;
  const int64_t shards = sharding.shards;
  const double passes = static_cast<double>(plan.num_microbatches);
  const double of_gradient =
      plan.arguments.ddp.grad_reduce_in_bf16 ? 2.0 : static_cast<double>(plan.bytes.sum);
  const double gradients = static_cast<double>(buffer.num_trained_elements) * of_gradient;
  const int64_t moved = sharding.values ? buffer.num_elements : buffer.num_trained_elements;
  const double values = static_cast<double>(moved) * static_cast<double>(plan.bytes.model);
  GroupTraffic traffic{"dp", sharding.ranks};
  if (sharding.gradients) {
    int64_t tables = 0;
    for (const BufferBucket& bucket : buffer.buckets)
      if (!bucket.frozen && bucket.table) tables += bucket.end - bucket.begin;
    const double of_tables = static_cast<double>(tables) * of_gradient;
    traffic.backward += passes * scatter(shards, gradients - of_tables);
    traffic.once += scatter(shards, of_tables);
  } else {
    traffic.once += scatter(shards, gradients);
  }
  if (sharding.values) {
    traffic.forward += passes * scatter(shards, values);
    traffic.backward += passes * scatter(shards, values);
  } else {
    traffic.once += scatter(shards, values);
  }
  if (sharding.replicas() > 1)
    traffic.once += all_reduce(sharding.replicas(), gradients / static_cast<double>(shards));
  return traffic;
}

void add(GroupTraffic& traffic, const PassTraffic& pass, int64_t num_microbatches) {
  traffic.forward += pass.forward * static_cast<double>(num_microbatches);
  traffic.backward += pass.backward * static_cast<double>(num_microbatches);
}

}  // namespace

std::vector<GroupTraffic> stage_traffic(const LayoutPlan& plan, int stage) {
  GroupTraffic tp{"tp", plan.tensor}, cp{"cp", plan.context}, pp{"pp", plan.pipeline},
      dp{"dp", plan.sharding.ranks}, embd{"embd", 1};
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    const StageSlice slice = plan.stages.slice(stage, chunk);
    if (plan.tensor > 1) add(tp, tensor_pass(plan, slice), plan.num_microbatches);
    if (plan.context > 1) add(cp, context_pass(plan, slice), plan.num_microbatches);
    if (plan.pipeline > 1) add(pp, pipeline_pass(plan, stage, chunk), plan.num_microbatches);
    if (plan.splits_vocabulary()) add(pp, vocabulary_pass(plan, stage), plan.num_microbatches);
    for (const PlannedBuffer& buffer : plan.buffers(stage, chunk)) {
      for (const Parameter* p : buffer.parameters) {
        if (!p->trainable) continue;
        const double gradient = static_cast<double>(num_elements(*p) * plan.bytes.sum);
        for (const ProcessGroup* group : partial_groups(*p, plan.held_by(stage).groups)) {
          if (group == p->shared) embd.ranks = group->size();
          (group == p->shared ? embd : tp).once += all_reduce(group->size(), gradient);
        }
      }
      if (buffer.sharding.ranks == 1) continue;
      const GroupTraffic data = data_traffic(plan, buffer);
      dp.forward += data.forward;
      dp.backward += data.backward;
      dp.once += data.once;
    }
  }
  std::vector<GroupTraffic> all;
  for (const GroupTraffic& traffic : {tp, cp, pp, dp, embd})
    if (traffic.ranks > 1) all.push_back(traffic);
  return all;
}

}  // namespace megatron
