#include "megatron/training/checkpoint_plan.h"

#include <algorithm>

#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

namespace {

struct StateBytes {
  int64_t per_element = 0;
  int64_t tensors = 0;  // that have such an element
};

StateBytes state_bytes(const LayoutPlan& plan) {
  StateBytes state{plan.bytes.model, 1};
  const OptimizerConfig& optimizer = plan.arguments.optimizer;
  if (plan.arguments.training.no_save_optim || plan.arguments.training.skip_train) return state;
  const auto add = [&](StateType type) {
    state.per_element += type == StateType::kFp32 ? 4 : 2;
    ++state.tensors;
  };
  if (plan.bytes.model == 2 && optimizer.main_params_dtype == StateType::kFp32)
    add(StateType::kFp32);
  add(optimizer.exp_avg_dtype);
  if (optimizer.optimizer == OptimizerType::kAdam) add(optimizer.exp_avg_sq_dtype);
  return state;
}

// The rank of the job at this place of the mesh.
size_t global_rank(const LayoutPlan& plan, int64_t tensor, int64_t data_and_context,
                   int64_t stage) {
  if (!plan.arguments.parallel.use_tp_pp_dp_mapping)
    return static_cast<size_t>(tensor +
                               plan.tensor * (data_and_context + plan.context * plan.data * stage));
  const int64_t context = data_and_context % plan.context, data = data_and_context / plan.context;
  return static_cast<size_t>(
      tensor + plan.tensor * (context + plan.context * (stage + plan.pipeline * data)));
}

// Elements at the start of the rank's part of a parameter that are no padding of the vocabulary.
int64_t valid_elements(const LayoutPlan& plan, const PlannedParameter& p, int64_t tensor,
                       int64_t stage, int64_t vocab_size) {
  const bool table =
      p.name == "embedding.word_embeddings.weight" || p.name == "output_layer.weight";
  if (!table) return p.local_elements;
  const int64_t rows = p.local_elements / plan.model().hidden_size;
  const int64_t part = p.stages > 1 ? tensor + plan.tensor * stage : tensor;
  return std::clamp<int64_t>(vocab_size - part * rows, 0, rows) * plan.model().hidden_size;
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
  const StateBytes state = state_bytes(plan);
  const int64_t shards = plan.sharding.shards;
  for (int64_t stage = 0; stage < plan.pipeline; ++stage) {
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
      const std::vector<PlannedParameter> parameters =
          chunk_parameters(plan, static_cast<int>(stage), chunk);
      const BufferLayout buffer = chunk_buffer(plan, parameters);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const PlannedParameter& p = parameters[i];
        if (p.is_copy) continue;
        const bool divided = p.global_elements != p.local_elements;
        const BufferSlot& slot = buffer.slots[i];
        const BufferBucket& bucket = buffer.buckets[static_cast<size_t>(slot.bucket)];
        const int64_t part = (bucket.end - bucket.begin) / shards;
        for (int64_t tensor = 0; tensor < (divided ? plan.tensor : 1); ++tensor) {
          const int64_t end = slot.begin + valid_elements(plan, p, tensor, stage, vocab_size);
          for (int64_t shard = (slot.begin - bucket.begin) / part; shard < shards; ++shard) {
            const int64_t from = std::max(slot.begin, bucket.begin + shard * part);
            const int64_t to = std::min(end, bucket.begin + (shard + 1) * part);
            if (from >= end) break;
            out.bytes[global_rank(plan, tensor, shard, stage)] += (to - from) * state.per_element;
            out.fragments += state.tensors;
          }
        }
      }
    }
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
