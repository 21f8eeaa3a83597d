#include "megatron/training/planning/checkpoint_plan.h"

#include <algorithm>
#include <numeric>

#include "megatron/dist_checkpointing/manifest.h"
#include "megatron/dist_checkpointing/replica_parts.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

namespace {

// Bytes per element of each optimizer state of a parameter, in the order in which they are stored.
std::vector<int64_t> state_bytes(const LayoutPlan& plan, const Parameter& p) {
  std::vector<int64_t> state;
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  if (plan.arguments.training.no_save_optim || plan.arguments.training.skip_train) return state;
  const UpdateRule& rule = update_rule(optimizer);
  const bool half = plan.bytes.model == 2 && !p.keeps_fp32;
  for (const OptimizerState& kept :
       optimizer_states(rule, optimizer, half, rule.kind_of(is_hidden_matrix(p))))
    state.push_back(kept.bytes());
  return state;
}

// Elements at the start of the rank's part of a parameter that are no padding of the vocabulary.
int64_t valid_elements(const Parameter& p, const ParallelGroups& groups) {
  if (p.valid_rows < 0) return num_elements(p);
  int64_t elements = 0;
  for (const ShardPiece& piece : shard_pieces(p, groups))
    elements += std::accumulate(piece.global.shape.begin(), piece.global.shape.end(), int64_t{1},
                                std::multiplies<>());
  return elements;
}

// Adds what the ranks that hold the same part of a stage's model write for a buffer: a shard holds
// its slice of every bucket, and the replicas of a shard divide it among themselves. `groups` are
// those of `first_rank`, the first of the ranks.
void add_buffer(const LayoutPlan& plan, const PlannedBuffer& buffer, int first_rank,
                const ParallelGroups& groups, CheckpointPlan& out) {
  const int64_t shards = buffer.sharding.shards;
  const int replicas = static_cast<int>(buffer.sharding.replicas());
  const std::vector<Parameter*>& parameters = buffer.parameters;
  std::vector<bool> stored(parameters.size());  // by this copy of the parameter
  std::vector<std::vector<int64_t>> states;     // of each parameter
  std::vector<int64_t> valid_of(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    stored[i] = copy_index(*parameters[i], groups).index == 0;
    valid_of[i] = valid_elements(*parameters[i], groups);
    states.push_back(state_bytes(plan, *parameters[i]));
  }
  for (int64_t shard = 0; shard < shards; ++shard) {
    std::vector<TensorSize> held;
    std::vector<int64_t> valid;                // elements of each before padding
    for (size_t pass = 0; pass < 2; ++pass) {  // weights, then optimizer states
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (!stored[i] || (pass == 1 && !parameters[i]->trainable)) continue;
        const BufferSlot& slot = buffer.layout.slots[i];
        const BufferBucket& bucket = buffer.layout.buckets[static_cast<size_t>(slot.bucket)];
        const int64_t part = (bucket.end - bucket.begin) / shards;
        const int64_t from = std::max(slot.begin, bucket.begin + shard * part),
                      limit = bucket.begin + (shard + 1) * part;
        const int64_t whole = std::min(slot.end, limit) - from;
        const int64_t valid_part = std::min(slot.begin + valid_of[i], limit) - from;
        const int64_t value = parameters[i]->keeps_fp32 ? plan.bytes.sum : plan.bytes.model;
        for (const int64_t bytes : pass == 0 ? std::vector<int64_t>{value} : states[i]) {
          held.push_back({std::max<int64_t>(0, whole), bytes});
          valid.push_back(std::max<int64_t>(0, valid_part));
        }
      }
    }
    for (const ReplicaPart& part : divide_among_replicas(held, replicas)) {
      const int64_t elements = std::min(part.end, valid[part.tensor]) - part.begin;
      if (elements <= 0) continue;
      const int64_t place = part.replica * shards + shard;  // as make_data_parallel_groups
      const int rank =
          first_rank + plan.mesh.rank_at(gradient_axes(buffer.domain), static_cast<int>(place));
      out.bytes[static_cast<size_t>(rank)] += elements * held[part.tensor].element_bytes;
      ++out.fragments;
    }
  }
}

void add_stage_ranks(const LayoutPlan& plan, int stage, const PlannedBuffer& buffer,
                     CheckpointPlan& out) {
  const AxisSet axes = stage_axes(buffer.domain);
  for (int part = 0; part < plan.mesh.group_size(axes); ++part) {
    const int rank = plan.mesh.rank_at({Axis::kPipeline}, stage) + plan.mesh.rank_at(axes, part);
    add_buffer(plan, buffer, rank, planned_groups(plan, rank), out);
  }
}

// State that is no parameter, such as a router's bias: the first rank of the stage writes it.
void add_module_state(const LayoutPlan& plan, int stage, CheckpointPlan& out) {
  const int rank = plan.mesh.rank_at({Axis::kPipeline}, stage);
  for (const auto& chunk : plan.held_by(stage).chunks)
    chunk->visit_state([&](const std::string&, at::Tensor& state) {
      out.bytes[static_cast<size_t>(rank)] += static_cast<int64_t>(state.nbytes());
      ++out.fragments;
    });
}

}  // namespace

double CheckpointPlan::seconds(double rank_bandwidth, double total_bandwidth) const {
  double time = static_cast<double>(most()) / rank_bandwidth;
  if (total_bandwidth > 0) time = std::max(time, static_cast<double>(total) / total_bandwidth);
  return time;
}

namespace {

// Bytes by rank and fragments.
CheckpointPlan plan_of_module(const LayoutPlan& plan) {
  CheckpointPlan out;
  out.bytes.assign(static_cast<size_t>(plan.mesh.world_size()), 0);
  for (int stage = 0; stage < static_cast<int>(plan.pipeline); ++stage) {
    for (const std::vector<PlannedBuffer>& buffers : plan.held_by(stage).buffers)
      for (const PlannedBuffer& buffer : buffers) add_stage_ranks(plan, stage, buffer, out);
    add_module_state(plan, stage, out);
  }
  return out;
}

}  // namespace

CheckpointPlan make_checkpoint_plan(const LayoutPlan& plan) {
  CheckpointPlan out = plan_of_module(plan);
  if (plan.encoders != nullptr) {  // their ranks are the first ones
    CheckpointPlan encoders = plan_of_module(*plan.encoders);
    out.bytes.insert(out.bytes.begin(), encoders.bytes.begin(), encoders.bytes.end());
    out.fragments += encoders.fragments;
  }
  int64_t blocks = 0;
  for (size_t rank = 0; rank < out.bytes.size(); ++rank) {
    const int64_t bytes = out.bytes[rank];
    out.total += bytes;
    out.files += bytes > 0;
    blocks += (bytes + static_cast<int64_t>(kCheckpointBlockBytes) - 1) /
              static_cast<int64_t>(kCheckpointBlockBytes);
    if (bytes > out.most()) out.fullest = static_cast<int>(rank);
  }
  out.manifest_bytes = 200 * out.fragments + 16 * blocks;
  return out;
}

}  // namespace megatron
