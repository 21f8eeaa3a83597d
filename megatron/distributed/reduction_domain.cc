#include "megatron/distributed/reduction_domain.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

ReductionDomain::ReductionDomain(int number, std::vector<Parameter*> parameters,
                                 std::vector<int> places, const ParallelGroups& groups,
                                 const DataGrid& data, at::ScalarType dtype, at::Device device,
                                 const DistributedDataParallelConfig& config)
    : number(number), places(std::move(places)) {
  layout.groups = data;
  layout.parameters = std::move(parameters);
  const bool sharded = data.shard.size() > 1;
  shard_grads = sharded && config.strategy() >= ShardingStrategy::kOptimGrads;
  shard_values = sharded && config.strategy() == ShardingStrategy::kOptimGradsParams;
  overlap_grads = config.overlap_grad_reduce;
  overlap_values = sharded && config.overlap_param_gather;
  plan(config, dtype);

  const auto value_options = at::TensorOptions().dtype(dtype).device(device);
  const auto grad_options = value_options.dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
  const GradReduction reduction{overlap_grads, config.grad_reduce_in_bf16, config.peer_copies};
  const ValueGathering gathering{config.overlap_param_gather, config.peer_copies};
  values = shard_values ? make_sharded_values(layout, value_options, gathering)
                        : make_whole_values(layout, value_options, gathering);
  grads = shard_grads ? make_sharded_grads(layout, grad_options, reduction)
                      : make_whole_grads(layout, grad_options, reduction);
  for (const bool experts : {false, true}) {
    std::vector<const Parameter*> scaled;
    for (const Parameter* parameter : layout.parameters)
      if (parameter->delayed_scaling && parameter->placement.expert == experts)
        scaled.push_back(parameter);
    if (scaled.empty()) continue;
    (experts ? expert_scaling : scaling) =
        std::make_unique<DelayedScaling>(std::move(scaled), groups, device);
  }
}

void ReductionDomain::plan(const DistributedDataParallelConfig& config, at::ScalarType dtype) {
  layout.buffer =
      plan_buffer_of(layout.parameters, layout.groups.shard.size(), layout.groups.replica.size(),
                     config, static_cast<int64_t>(at::elementSize(dtype)));
  sequence = std::make_unique<BucketSequence>(reduction_order(layout.buffer, layout.parameters));
}

void ReductionDomain::zero_grad(int64_t passes) {
  grads->zero();
  for (const auto* one : {&scaling, &expert_scaling})
    if (*one) (*one)->restart();
  // Sharded gradients are reduced after every pass, whole ones after all of them.
  sequence->restart(shard_grads ? passes : 1, shard_grads ? 1 : passes);
}

void ReductionDomain::grad_ready(int index) {
  const bool too_often = sequence->report(index);
  MEGATRON_ASSERT(!too_often, "gradient of ", layout.parameters[index]->name,
                  " was reported more often than this step's passes use it");
  if (!shard_grads && !overlap_grads) return;
  while (const std::optional<int> bucket = sequence->next_ready())
    grads->reduce(*bucket, sequence->in_last_round());
}

void ReductionDomain::finish_grad_sync() {
  while (const std::optional<int> bucket = sequence->next_left())
    grads->reduce(*bucket, sequence->in_last_round());
  grads->finish();
}

void ReductionDomain::add_shards(bool frozen, std::vector<FlatShard>& shards) const {
  bool first_of_domain = true, wide = false;
  int64_t value_end = -1, grad_end = -1;
  for (int bucket = 0; bucket < layout.num_buckets(); ++bucket) {
    if (layout.buffer.buckets[bucket].frozen != frozen) continue;
    const int64_t count = layout.shard_elements(bucket);
    const int64_t value_begin = values->own_begin(bucket);
    const int64_t grad_begin = frozen ? -1 : grads->own_begin(bucket);
    const bool continues = !first_of_domain && layout.buffer.buckets[bucket].wide == wide &&
                           value_begin == value_end && (frozen || grad_begin == grad_end);
    if (!continues) shards.emplace_back();
    first_of_domain = false;
    FlatShard& shard = shards.back();
    shard.domain = number;
    const int64_t before = continues ? shard.values.numel() : 0;
    wide = layout.buffer.buckets[bucket].wide;
    const int64_t value_count = layout.value_shard_elements(bucket), width = value_count / count;
    value_end = value_begin + value_count;
    grad_end = grad_begin + count;
    shard.values = layout.as_values(
        values->flat().narrow(0, value_begin - before * width, (before + count) * width), bucket);
    if (!frozen) shard.grads = grads->flat().narrow(0, grad_begin - before, before + count);
    const int64_t first =
        layout.bucket_begin(bucket) + layout.shard_begin(bucket);  // offset in the buffer
    for (int index : layout.buffer.buckets[bucket].parameters) {
      const BufferSlot& slot = layout.buffer.slots[index];
      const int64_t begin = std::max(slot.begin, first), end = std::min(slot.end, first + count);
      if (begin >= end) continue;
      shard.slots.push_back({layout.parameters[index], places[index], before + begin - first,
                             begin - slot.begin, end - slot.begin});
    }
  }
}

}  // namespace megatron
