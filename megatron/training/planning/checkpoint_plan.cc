#include "megatron/training/planning/checkpoint_plan.h"

#include <algorithm>

#include "megatron/dist_checkpointing/manifest.h"
#include "megatron/dist_checkpointing/replica_parts.h"
#include "megatron/nn/reduction.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {

namespace {

// Bytes per element of each optimizer state of a weight, in the order in which they are stored.
std::vector<int64_t> state_bytes(const LayoutPlan& plan) {
  std::vector<int64_t> state;
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  if (plan.arguments.training.no_save_optim || plan.arguments.training.skip_train) return state;
  for (const OptimizerState& kept :
       optimizer_states(update_rule(optimizer), optimizer, plan.bytes.model == 2))
    state.push_back(kept.bytes());
  return state;
}

// Elements at the start of the rank's part of a parameter that are no padding of the vocabulary.
int64_t valid_elements(const LayoutPlan& plan, const PlannedParameter& p, int rank,
                       int64_t vocab_size) {
  const bool table =
      p.name == "embedding.word_embeddings.weight" || p.name == "output_layer.weight";
  if (!table) return p.local_elements;
  const int64_t rows = p.local_elements / plan.model().hidden_size;
  const int64_t part = plan.mesh.rank_in_group(rank, {p.placement.shards.at(0).axis});
  return std::clamp<int64_t>(vocab_size - part * rows, 0, rows) * plan.model().hidden_size;
}

// Adds what the data-parallel ranks of one tensor rank and stage write for a chunk: a shard holds
// its slice of every bucket, and the replicas of a shard divide it among themselves.
void add_chunk(const LayoutPlan& plan, int64_t vocab_size, int64_t stage, int chunk, int64_t tensor,
               CheckpointPlan& out) {
  const std::vector<PlannedParameter> parameters =
      chunk_parameters(plan, static_cast<int>(stage), chunk);
  const BufferLayout buffer = chunk_buffer(plan, parameters);
  const std::vector<int64_t> state = state_bytes(plan);
  const int64_t shards = plan.sharding.shards;
  const int replicas = static_cast<int>(plan.sharding.replicas());
  const int first_rank = plan.mesh.rank_at({Axis::kTensor}, static_cast<int>(tensor)) +
                         plan.mesh.rank_at({Axis::kPipeline}, static_cast<int>(stage));
  std::vector<bool> stored(parameters.size());  // by this copy of the parameter
  for (size_t i = 0; i < parameters.size(); ++i) {
    const AxisSet copies = copy_axes(parameters[i].placement);
    stored[i] = !parameters[i].is_copy && plan.mesh.rank_in_group(first_rank, copies) == 0;
  }
  for (int64_t shard = 0; shard < shards; ++shard) {
    std::vector<TensorSize> held;
    std::vector<int64_t> valid;                // elements of each before padding
    for (size_t pass = 0; pass < 2; ++pass) {  // weights, then optimizer states
      for (size_t i = 0; i < parameters.size(); ++i) {
        const PlannedParameter& p = parameters[i];
        if (!stored[i] || (pass == 1 && p.frozen)) continue;
        const BufferSlot& slot = buffer.slots[i];
        const BufferBucket& bucket = buffer.buckets[static_cast<size_t>(slot.bucket)];
        const int64_t part = (bucket.end - bucket.begin) / shards;
        const int64_t from = std::max(slot.begin, bucket.begin + shard * part),
                      limit = bucket.begin + (shard + 1) * part;
        const int64_t whole = std::min(slot.begin + p.local_elements, limit) - from;
        const int64_t valid_part =
            std::min(slot.begin + valid_elements(plan, p, first_rank, vocab_size), limit) - from;
        for (const int64_t bytes : pass == 0 ? std::vector<int64_t>{plan.bytes.model} : state) {
          held.push_back({std::max<int64_t>(0, whole), bytes});
          valid.push_back(std::max<int64_t>(0, valid_part));
        }
      }
    }
    for (const ReplicaPart& part : divide_among_replicas(held, replicas)) {
      const int64_t elements = std::min(part.end, valid[part.tensor]) - part.begin;
      if (elements <= 0) continue;
      const int64_t place = part.replica * shards + shard;  // as make_data_parallel_groups
      const int rank = first_rank + plan.mesh.rank_at(gradient_axes({}), static_cast<int>(place));
      out.bytes[static_cast<size_t>(rank)] += elements * held[part.tensor].element_bytes;
      ++out.fragments;
    }
  }
}

}  // namespace

double CheckpointPlan::seconds(double rank_bandwidth, double total_bandwidth) const {
  double time = static_cast<double>(most()) / rank_bandwidth;
  if (total_bandwidth > 0) time = std::max(time, static_cast<double>(total) / total_bandwidth);
  return time;
}

CheckpointPlan make_checkpoint_plan(const LayoutPlan& plan, int64_t vocab_size) {
  CheckpointPlan out;
  out.bytes.assign(static_cast<size_t>(plan.arguments.world_size), 0);
  for (int64_t stage = 0; stage < plan.pipeline; ++stage)
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk)
      for (int64_t tensor = 0; tensor < plan.tensor; ++tensor)
        add_chunk(plan, vocab_size, stage, chunk, tensor, out);
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
