#include "megatron/distributed/sharded_layout.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

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

// Megatron's default: large enough for the bandwidth of the collective, growing with the ranks.
int64_t bucket_size(const DistributedDataParallelConfig& config, ShardingStrategy strategy,
                    int data_ranks, int64_t trained_elements) {
  if (strategy == ShardingStrategy::kOptimGradsParams || data_ranks == 1) return 0;
  if (config.ddp_bucket_size) return *config.ddp_bucket_size;
  if (config.ddp_num_buckets)
    return (trained_elements + *config.ddp_num_buckets - 1) / *config.ddp_num_buckets;
  // Gradients that are kept whole and reduced after the backward need no buckets.
  if (strategy != ShardingStrategy::kOptimGrads && !config.overlap_grad_reduce) return 0;
  return std::max<int64_t>(40'000'000, int64_t{1'000'000} * data_ranks);
}

bool is_shared(const Parameter& parameter) {
  return parameter.shared != nullptr && parameter.shared->size() > 1;
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

int64_t num_elements(const Parameter& parameter) {
  return std::accumulate(parameter.local_shape.begin(), parameter.local_shape.end(), int64_t{1},
                         std::multiplies<>());
}

BufferLayout plan_buffer_of(const std::vector<Parameter*>& parameters, int num_shards,
                            int num_replicas, const DistributedDataParallelConfig& config,
                            int64_t element) {
  const ShardingStrategy strategy = num_shards > 1 ? config.strategy() : ShardingStrategy::kNoShard;
  std::vector<BufferParameter> sizes;
  std::vector<std::string> names;
  std::vector<bool> norms;
  for (const Parameter* parameter : parameters) {
    names.push_back(parameter->name);
    norms.push_back(parameter->role == ParameterRole::kNorm);
  }
  const std::vector<int> units = sharding_units(names, norms);
  int64_t trained_elements = 0;
  for (const Parameter* parameter : parameters) {
    const bool embedding = parameter->role == ParameterRole::kEmbedding,
               tied = embedding && parameter->uses > 1,
               whole =
                   config.whole_matrices && parameter->trainable && is_hidden_matrix(*parameter);
    sizes.push_back({num_elements(*parameter), tied || is_shared(*parameter),
                     strategy == ShardingStrategy::kOptimGradsParams ? units[sizes.size()] : 0,
                     !parameter->trainable, embedding, whole, parameter->keeps_fp32});
    if (parameter->trainable) trained_elements += sizes.back().num_elements;
  }
  BufferOptions options;
  options.num_shards = num_shards;
  options.wide_elements = std::max<int64_t>(1, int64_t{sizeof(float)} / element);
  options.shard_alignment = config.ddp_pad_buckets_for_high_nccl_busbw ? 65536 : 128;
  options.bucket_size = bucket_size(config, strategy, num_shards * num_replicas, trained_elements);
  return plan_buffer(sizes, options);
}

BucketSequence reduction_order(const BufferLayout& layout,
                               const std::vector<Parameter*>& parameters) {
  std::vector<int> order, last, uses;
  std::vector<std::vector<int>> members;
  for (const BufferBucket& bucket : layout.buckets) {
    const int index = static_cast<int>(members.size());
    members.emplace_back();
    if (bucket.frozen) continue;
    (bucket.own ? last : order).push_back(index);
    members.back() = bucket.parameters;
  }
  order.insert(order.end(), last.begin(), last.end());
  for (const Parameter* parameter : parameters) uses.push_back(parameter->uses);
  return {std::move(order), std::move(members), std::move(uses)};
}

at::Tensor ShardedLayout::view_in_bucket(const at::Tensor& bucket, int index) const {
  const BufferSlot& slot = buffer.slots.at(index);
  return bucket.narrow(0, slot.begin - bucket_begin(slot.bucket), slot.end - slot.begin)
      .view(parameters[index]->local_shape);
}

at::Tensor ShardedLayout::as_values(const at::Tensor& elements, int bucket) const {
  const bool narrow = elements.element_size() < static_cast<int64_t>(sizeof(float));
  return buffer.buckets[bucket].wide && narrow ? elements.view(at::kFloat) : elements;
}

at::Tensor ShardedLayout::value_in_bucket(const at::Tensor& values, int index) const {
  return view_in_bucket(as_values(values, buffer.slots.at(index).bucket), index);
}

at::Tensor ShardedLayout::view_in_buffer(const at::Tensor& flat, int index) const {
  const BufferSlot& slot = buffer.slots.at(index);
  return flat.narrow(0, slot.begin, slot.end - slot.begin).view(parameters[index]->local_shape);
}

}  // namespace megatron
