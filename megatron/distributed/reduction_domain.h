// The parameters of a store whose gradients are summed over the same ranks (domain_of in
// nn/reduction.h): buckets of their own, where their values and gradients lie, and the order in
// which the gradients are reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "megatron/distributed/bucket_sequence.h"
#include "megatron/distributed/delayed_scaling.h"
#include "megatron/distributed/grad_buffer.h"
#include "megatron/distributed/value_buffer.h"

namespace megatron {

// A contiguous range of elements of one parameter that this rank updates.
struct FlatSlot {
  Parameter* parameter = nullptr;
  int index = 0;           // parameter index, in model order
  int64_t begin = 0;       // offset in the tensors of the shard
  int64_t flat_begin = 0;  // offset in the flattened local parameter
  int64_t flat_end = 0;
  int64_t num_elements() const { return flat_end - flat_begin; }
};

// A piece of this rank's shard that is contiguous in values and in gradients: everything of one
// type in one piece, or one slice per bucket. A piece is either all trained or all frozen. An
// element has the same offset in both tensors.
struct FlatShard {
  at::Tensor values;  // [n] in the model's type, or fp32 if all its parameters keep that; a view
  at::Tensor grads;   // [n] fp32 (fp64), a view; sums over the data ranks after finish_grad_sync().
                      // Undefined: frozen
  std::vector<FlatSlot> slots;
  int domain = 0;  // reduction domain (domain_of in nn/reduction.h)
  bool trained() const { return grads.defined(); }
};

struct ReductionDomain {
  // `parameters` in model order, and their places there among all of the store.
  ReductionDomain(int number, std::vector<Parameter*> parameters, std::vector<int> places,
                  const ParallelGroups& groups, const DataGrid& data, at::ScalarType dtype,
                  at::Device device, const DistributedDataParallelConfig& config);
  ReductionDomain(const ReductionDomain&) = delete;
  ReductionDomain& operator=(const ReductionDomain&) = delete;

  // Starts a step of `passes` backward passes.
  void zero_grad(int64_t passes);
  // The gradient of the parameter with this index here is ready; reduces the buckets that are
  // complete, if reductions start during the backward. Collective.
  void grad_ready(int index);
  // Reduces the other buckets and waits for all. Collective.
  void finish_grad_sync();
  // Appends this rank's shards of the buckets that are frozen, or of the others.
  void add_shards(bool frozen, std::vector<FlatShard>& shards) const;

  const int number;               // the domain's
  const std::vector<int> places;  // by parameter: its index in the store
  bool shard_grads = false;       // gradients are reduce-scattered after every pass
  bool shard_values = false;
  bool overlap_grads = false;
  bool overlap_values = false;
  ShardedLayout layout;
  std::unique_ptr<ValueBuffer> values;
  std::unique_ptr<GradBuffer> grads;
  std::unique_ptr<BucketSequence> sequence;
  // Of the weights that use delayed scaling: dense ones, those of experts; null: none does.
  std::unique_ptr<DelayedScaling> scaling, expert_scaling;
  const DelayedScaling& scaling_of(const Parameter& weight) const {
    return weight.placement.expert ? *expert_scaling : *scaling;
  }

 private:
  void plan(const DistributedDataParallelConfig& config, at::ScalarType dtype);
};

}  // namespace megatron
