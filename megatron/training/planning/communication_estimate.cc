#include "megatron/training/planning/communication_estimate.h"

#include <utility>

#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/reduction.h"

namespace megatron {

namespace {

double all_reduce(int64_t ranks, double bytes) { return 2 * scatter_bytes(ranks, bytes); }

// What one micro-batch sends in one chunk over the ranks that divide its layers.
struct ChunkTraffic {
  Traffic tensor, context, expert, expert_tensor;
};

ChunkTraffic chunk_traffic(const LayoutPlan& plan, const StageSlice& slice, const EndsCost& ends) {
  const TransformerConfig& config = plan.model();
  const int64_t layers = slice.num_layers;
  const RecomputedLayers again = recomputed_layers(config, layers);
  ChunkTraffic sent;
  for (int64_t i = 0; i < layers; ++i) {
    const LayerCost layer = plan.layer_cost(slice.first_layer + i + 1);
    for (const auto& [sum, more] :
         {std::pair{&sent.tensor, layer.tensor()}, std::pair{&sent.context, layer.context()},
          std::pair{&sent.expert, layer.expert()},
          std::pair{&sent.expert_tensor, layer.expert_tensor()}}) {
      *sum += more;
      if (i < again.layers) sum->backward += more.forward;
    }
  }
  if (config.distribute_saved_activations)
    sent.tensor.backward +=
        static_cast<double>(again.units) *
        scatter_bytes(plan.tensor, static_cast<double>(plan.stream_bytes() *
                                                       (plan.sequence_parallel ? plan.tensor : 1)));
  if (slice.embedding || slice.num_parts > 0) {
    sent.tensor += ends.embedding.tensor;
    sent.context += ends.embedding.context;
  }
  if (plan.splits_vocabulary())
    sent.tensor += ends.split_head.tensor;
  else if (slice.head) {
    sent.tensor += ends.head.tensor;
    sent.context += ends.head.context;
    sent.expert += ends.head.expert;
    sent.expert_tensor += ends.head.expert_tensor;
  }
  return sent;
}

Traffic pipeline_pass(const LayoutPlan& plan, int stage, int chunk) {
  const int segment = plan.schedule.segment(stage, chunk);
  const auto elsewhere = [&](int other) {
    return other >= 0 && other < plan.schedule.num_segments() &&
           plan.schedule.place(other).stage != stage;
  };
  const StageSlice slice = plan.stages.slice(stage, chunk);
  const auto bytes = [&](int64_t layers_before) {
    return static_cast<double>(plan.border_bytes(layers_before));
  };
  return {elsewhere(segment + 1) ? bytes(slice.layers_through()) : 0,
          elsewhere(segment - 1) ? bytes(slice.layers_before()) : 0};
}

// Collectives over all stages when the vocabulary is split over them. In a ring broadcast every
// rank but the last sends.
Traffic vocabulary_pass(const LayoutPlan& plan, int stage) {
  const SplitHeadCost& head = plan.ends.split_head;
  const double hidden = static_cast<double>(head.hidden),
               statistics = static_cast<double>(head.statistics);
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
  int64_t moved = 0;
  for (const BufferBucket& bucket : buffer.buckets)
    if (sharding.values || !bucket.frozen) moved += bucket.value_elements;
  const double values = static_cast<double>(moved) * static_cast<double>(plan.bytes.model);
  GroupTraffic traffic{"dp", sharding.ranks};
  if (sharding.gradients) {
    int64_t tables = 0;
    for (const BufferBucket& bucket : buffer.buckets)
      if (!bucket.frozen && bucket.table) tables += bucket.end - bucket.begin;
    const double of_tables = static_cast<double>(tables) * of_gradient;
    traffic.backward += passes * scatter_bytes(shards, gradients - of_tables);
    traffic.once += scatter_bytes(shards, of_tables);
  } else {
    traffic.once += scatter_bytes(shards, gradients);
  }
  if (sharding.values) {
    traffic.forward += passes * scatter_bytes(shards, values);
    traffic.backward += passes * scatter_bytes(shards, values);
  } else {
    traffic.once += scatter_bytes(shards, values);
  }
  if (sharding.replicas() > 1)
    traffic.once += all_reduce(sharding.replicas(), gradients / static_cast<double>(shards));
  return traffic;
}

void add(GroupTraffic& traffic, const Traffic& pass, int64_t num_microbatches) {
  traffic.forward += pass.forward * static_cast<double>(num_microbatches);
  traffic.backward += pass.backward * static_cast<double>(num_microbatches);
}

}  // namespace

std::vector<GroupTraffic> stage_traffic(const LayoutPlan& plan, int stage) {
  GroupTraffic tp{"tp", plan.tensor}, cp{"cp", plan.context}, ep{"ep", plan.expert},
      etp{"etp", plan.arguments.parallel.expert_tensor_size()}, pp{"pp", plan.pipeline},
      dp{"dp", plan.sharding.ranks}, edp{"edp", 1}, embd{"embd", 1};
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    const StageSlice slice = plan.stages.slice(stage, chunk);
    const ChunkTraffic layers = chunk_traffic(plan, slice, plan.ends_of(stage, chunk));
    if (plan.tensor > 1) add(tp, layers.tensor, plan.num_microbatches);
    if (plan.context > 1) add(cp, layers.context, plan.num_microbatches);
    if (plan.expert > 1) add(ep, layers.expert, plan.num_microbatches);
    if (etp.ranks > 1) add(etp, layers.expert_tensor, plan.num_microbatches);
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
      GroupTraffic& sum = buffer.domain.expert ? edp : dp;
      sum.ranks = data.ranks;
      sum.forward += data.forward;
      sum.backward += data.backward;
      sum.once += data.once;
    }
  }
  std::vector<GroupTraffic> all;
  for (const GroupTraffic& traffic : {tp, cp, ep, etp, pp, dp, edp, embd})
    if (traffic.ranks > 1 && (traffic.group != "etp" || traffic.total() > 0))
      all.push_back(traffic);
  return all;
}

}  // namespace megatron
