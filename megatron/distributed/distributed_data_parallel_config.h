// Flags of data parallelism: what is sharded over the data ranks, and when gradients and parameters
// are communicated.
#pragma once

#include <cstdint>
#include <optional>

#include "megatron/base/fields.h"

namespace megatron {

// What is sharded over the data ranks; each value includes the ones before it (ZeRO stages 0 to 3).
enum class ShardingStrategy { kNoShard, kOptim, kOptimGrads, kOptimGradsParams };

struct DistributedDataParallelConfig : Config {
  // -- sharding
  bool use_distributed_optimizer = false;
  bool use_megatron_fsdp = false;
  // Used with use_megatron_fsdp
  ShardingStrategy data_parallel_sharding_strategy = ShardingStrategy::kOptimGradsParams;
  int64_t num_distributed_optimizer_instances = 1;

  // -- communication
  bool overlap_grad_reduce = false;
  bool overlap_param_gather = false;
  bool peer_copies = true;  // between GPUs of one host, instead of NCCL collectives
  bool grad_reduce_in_bf16 = false;
  std::optional<int64_t> ddp_bucket_size;  // elements
  std::optional<int64_t> ddp_num_buckets;
  bool ddp_pad_buckets_for_high_nccl_busbw = false;

  // Not a flag: the update rule needs whole matrices, so no shard border may cut one
  // (is_hidden_matrix()).
  bool whole_matrices = false;

  ShardingStrategy strategy() const;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

}  // namespace megatron
