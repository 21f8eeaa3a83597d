// What the value and gradient buffers of one store share: its parameters, where they lie, and which
// rank holds which shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/bucket_sequence.h"
#include "megatron/distributed/buffer_layout.h"
#include "megatron/distributed/distributed_data_parallel_config.h"
#include "megatron/nn/parameter.h"

namespace megatron {

// The ranks that process different tokens with the same weights, as a grid: an instance is a set of
// ranks that together hold all shards. Without sharding an instance is one rank.
struct DataGrid {
  ProcessGroup shard;    // one instance: consecutive ranks that shard every bucket
  ProcessGroup replica;  // ranks of all instances with the same shard
};

// The grid of each reduction domain (nn/reduction.h).
using DataParallelGroups = std::vector<DataGrid>;

// Collective over the gradient groups. Throws Error if the data ranks cannot be divided into the
// given number of instances. Model chunks of one rank share one result.
DataParallelGroups make_data_parallel_groups(const ParallelGroups& groups,
                                             const DistributedDataParallelConfig& config);

// Whether update rules that need whole matrices see the parameter as one: a weight of a linear.
// Embeddings, the output layer, norms and biases are updated element by element.
bool is_hidden_matrix(const Parameter& parameter);

// Elements of this rank's part.
int64_t num_elements(const Parameter& parameter);

// Where the parameters of one reduction domain, in model order, lie in flat buffers that
// `num_shards` ranks divide and each of `num_replicas` such sets of ranks holds. `element`: bytes
// of an element of the model's type.
BufferLayout plan_buffer_of(const std::vector<Parameter*>& parameters, int num_shards,
                            int num_replicas, const DistributedDataParallelConfig& config,
                            int64_t element);

// The order in which their gradients are reduced: that of the buffer, then the buckets of a single
// parameter that others than its layer use, too.
BucketSequence reduction_order(const BufferLayout& layout,
                               const std::vector<Parameter*>& parameters);

// Shard k of a bucket is its k-th equal slice. Its borders may cut every parameter that is not laid
// out whole (BufferParameter::whole).
struct ShardedLayout {
  std::vector<Parameter*> parameters;  // in model order, like buffer.slots
  BufferLayout buffer;
  DataGrid groups;

  int num_buckets() const { return static_cast<int>(buffer.buckets.size()); }
  int64_t bucket_begin(int bucket) const { return buffer.buckets[bucket].begin; }
  int64_t bucket_elements(int bucket) const {
    return buffer.buckets[bucket].end - buffer.buckets[bucket].begin;
  }
  int64_t shard_elements(int bucket) const { return bucket_elements(bucket) / groups.shard.size(); }
  // Where this rank's shard of a bucket begins: in the whole bucket, and in the concatenation of
  // this rank's shards of all buckets.
  int64_t shard_begin(int bucket) const { return groups.shard.rank() * shard_elements(bucket); }
  int64_t packed_begin(int bucket) const { return bucket_begin(bucket) / groups.shard.size(); }
  int64_t packed_trained_elements() const {
    return buffer.num_trained_elements / groups.shard.size();
  }

  // A view, shaped like parameter `index`, of a tensor that holds its whole bucket, or the whole
  // buffer, one element for each of its elements.
  at::Tensor view_in_bucket(const at::Tensor& bucket, int index) const;
  at::Tensor view_in_buffer(const at::Tensor& flat, int index) const;

  // Values of all buckets lie in one tensor of the model's type, in which those of a wide bucket
  // are fp32 numbers. The same as above in these elements.
  int64_t value_begin(int bucket) const { return buffer.buckets[bucket].value_begin; }
  int64_t value_elements(int bucket) const { return buffer.buckets[bucket].value_elements; }
  int64_t value_shard_elements(int bucket) const {
    return value_elements(bucket) / groups.shard.size();
  }
  int64_t packed_value_begin(int bucket) const { return value_begin(bucket) / groups.shard.size(); }
  int64_t packed_value_elements() const { return buffer.num_value_elements / groups.shard.size(); }
  // A view of values of this bucket, given in the model's type, with one element for each value.
  at::Tensor as_values(const at::Tensor& elements, int bucket) const;
  // A view, shaped like parameter `index`, of the values of its bucket.
  at::Tensor value_in_bucket(const at::Tensor& values, int index) const;
};

}  // namespace megatron
