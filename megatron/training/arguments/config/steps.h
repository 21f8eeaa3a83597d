// The steps of a run: their number and batches, and what is compared between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "megatron/base/fields.h"

namespace megatron {

inline constexpr int64_t kReplicaHashInterval = 100;  // iterations

struct StepsConfig {
  std::string task = "gpt";
  int64_t micro_batch_size = 0;
  std::optional<int64_t> global_batch_size;  // default: micro batch size times data-parallel size
  std::string step_batch_size_schedule;
  bool decrease_batch_size_if_needed = false;
  std::optional<int64_t> train_iters, train_samples;
  bool calculate_per_token_loss = true;
  bool skip_train = false;
  // None: kReplicaHashInterval; 0: never
  std::optional<int64_t> check_weight_hash_across_dp_replicas_interval;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  // Iterations between comparisons of replicated tensors; 0: never.
  int64_t replica_hash_interval() const {
    return check_weight_hash_across_dp_replicas_interval.value_or(kReplicaHashInterval);
  }
};

}  // namespace megatron
