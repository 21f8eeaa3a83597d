#include "megatron/distributed/distributed_data_parallel_config.h"

#include <array>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::array<std::string_view, 4> kStrategies = {"no_shard", "optim", "optim_grads",
                                                         "optim_grads_params"};

void check_positive(const char* flag, const std::optional<int64_t>& value, Violations& violations) {
  if (value && *value < 1) violations.add(cat(flag, " is ", *value), "1 or above");
}

}  // namespace

ShardingStrategy DistributedDataParallelConfig::strategy() const {
  if (use_megatron_fsdp) return data_parallel_sharding_strategy;
  return use_distributed_optimizer ? ShardingStrategy::kOptim : ShardingStrategy::kNoShard;
}

void DistributedDataParallelConfig::fields(FieldVisitor& visitor) {
  visitor.role(FieldRole::kMachine);
  visitor.group("data parallelism");
  visitor.field("use_distributed_optimizer", use_distributed_optimizer,
                "divide master weights and moments over the data ranks (ZeRO-1)");
  visitor.field("use_megatron_fsdp", use_megatron_fsdp,
                "shard what data-parallel-sharding-strategy says over the data ranks");
  visitor.choice(
      "data_parallel_sharding_strategy", data_parallel_sharding_strategy, kStrategies,
      "with use-megatron-fsdp: nothing; optimizer states; and gradients; and parameters");
  visitor.field(
      "num_distributed_optimizer_instances", num_distributed_optimizer_instances,
      "divide the data ranks into that many groups of consecutive ranks: shards inside a group, "
      "copies between groups");
  visitor.field("overlap_grad_reduce", overlap_grad_reduce,
                "sum gradients over the data ranks bucket by bucket, while the backward runs");
  visitor.field("overlap_param_gather", overlap_param_gather,
                "gather parameters bucket by bucket, while the next forward runs");
  visitor.field({"peer_copies", "--no-peer-copies", true}, peer_copies,
                "communicate parameters, gradients and tensor-parallel rows by collectives even "
                "between GPUs of one host that can access one another's memory");
  visitor.field(
      "grad_reduce_in_bf16", grad_reduce_in_bf16,
      "round gradients to bf16 for the sums over the data ranks; main gradients stay in fp32");
  visitor.field("ddp_bucket_size", ddp_bucket_size,
                "elements after which a bucket closes; default: 40 million, 1 million per data "
                "rank if that is more");
  visitor.field("ddp_num_buckets", ddp_num_buckets, "number of buckets, instead of their size");
  visitor.field("ddp_pad_buckets_for_high_nccl_busbw", ddp_pad_buckets_for_high_nccl_busbw,
                "make the length of a bucket a multiple of 65536");
}

void DistributedDataParallelConfig::validate(Violations& violations) const {
  check_positive("--num-distributed-optimizer-instances", num_distributed_optimizer_instances,
                 violations);
  check_positive("--ddp-bucket-size", ddp_bucket_size, violations);
  check_positive("--ddp-num-buckets", ddp_num_buckets, violations);
  if (ddp_bucket_size && ddp_num_buckets)
    violations.add("--ddp-bucket-size and --ddp-num-buckets are both given", "give one of them");
  const ShardingStrategy sharding = strategy();
  if (!use_megatron_fsdp && data_parallel_sharding_strategy != ShardingStrategy::kOptimGradsParams)
    violations.add("--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp",
                   "give --use-megatron-fsdp too, or --use-distributed-optimizer for optim");
  if (overlap_param_gather && sharding == ShardingStrategy::kNoShard)
    violations.add(
        "--overlap-param-gather has nothing to gather: every rank updates every parameter",
        "--use-distributed-optimizer, or --use-megatron-fsdp");
  if (overlap_param_gather && !overlap_grad_reduce)
    violations.add("--overlap-param-gather is given without --overlap-grad-reduce", "give both");
  if (num_distributed_optimizer_instances > 1 && sharding == ShardingStrategy::kNoShard)
    violations.add(
        cat("--num-distributed-optimizer-instances ", num_distributed_optimizer_instances,
            " divides nothing: every rank updates every parameter"),
        "--use-distributed-optimizer, or --use-megatron-fsdp");
  if (sharding == ShardingStrategy::kOptimGradsParams && (ddp_bucket_size || ddp_num_buckets))
    violations.add(
        "--ddp-bucket-size and --ddp-num-buckets have no effect when parameters are sharded",
        "leave them out: a layer is a bucket");
  if (ddp_pad_buckets_for_high_nccl_busbw && sharding == ShardingStrategy::kNoShard)
    violations.add(
        "--ddp-pad-buckets-for-high-nccl-busbw has no effect on gradients that are not sharded",
        "leave it out, or give --use-distributed-optimizer");
}

}  // namespace megatron
