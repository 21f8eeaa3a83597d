#include "megatron/distributed/sharded_layout.h"

#include "megatron/base/check.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

DataGrid make_grid(const ProcessGroup& all, const DistributedDataParallelConfig& config) {
  if (config.strategy() == ShardingStrategy::kNoShard) return {ProcessGroup(), all};
  const int instances = static_cast<int>(config.num_distributed_optimizer_instances);
  MEGATRON_CHECK(instances >= 1 && all.size() % instances == 0,
                 "--num-distributed-optimizer-instances ", instances, " does not divide the ",
                 all.size(), " ranks that hold the same weights");
  if (instances == 1) return {all, ProcessGroup()};
  const int shards = all.size() / instances;
  return {all.subgroup(block_of(all.rank(), shards), "optimizer_shard"),
          all.subgroup(across_blocks(all.rank(), shards, all.size()), "optimizer_instance")};
}

}  // namespace

DataParallelGroups make_data_parallel_groups(const ParallelGroups& groups,
                                             const DistributedDataParallelConfig& config) {
  DataParallelGroups grids;
  for (const Placement& domain : reduction_domains(groups))
    grids.push_back(make_grid(gradient_group(domain, groups), config));
  return grids;
}

bool is_hidden_matrix(const Parameter& parameter) {
  return parameter.role == ParameterRole::kWeight && parameter.global_shape.size() == 2;
}

at::Tensor ShardedLayout::view_in_bucket(const at::Tensor& bucket, int index) const {
  const BufferSlot& slot = buffer.slots.at(index);
  return bucket.narrow(0, slot.begin - bucket_begin(slot.bucket), slot.end - slot.begin)
      .view(parameters[index]->local_shape);
}

at::Tensor ShardedLayout::view_in_buffer(const at::Tensor& flat, int index) const {
  const BufferSlot& slot = buffer.slots.at(index);
  return flat.narrow(0, slot.begin, slot.end - slot.begin).view(parameters[index]->local_shape);
}

}  // namespace megatron
