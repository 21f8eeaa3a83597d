#include "megatron/distributed/sharded_layout.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

DataParallelGroups make_data_parallel_groups(const ParallelGroups& groups,
                                             const DistributedDataParallelConfig& config) {
  const ProcessGroup& all = groups.dp_cp;
  if (config.strategy() == ShardingStrategy::kNoShard) return {ProcessGroup(), all};
  const int instances = static_cast<int>(config.num_distributed_optimizer_instances);
  MEGATRON_CHECK(instances >= 1 && all.size() % instances == 0,
                 "--num-distributed-optimizer-instances ", instances, " does not divide the ",
                 all.size(), " ranks that hold the same weights");
  if (instances == 1) return {all, ProcessGroup()};
  const int shards = all.size() / instances;
  const int instance = all.rank() / shards, shard = all.rank() % shards;
  std::vector<int> neighbours, copies;
  for (int k = 0; k < shards; ++k) neighbours.push_back(instance * shards + k);
  for (int i = 0; i < instances; ++i) copies.push_back(i * shards + shard);
  return {all.subgroup(neighbours, "optimizer_shard"), all.subgroup(copies, "optimizer_instance")};
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
