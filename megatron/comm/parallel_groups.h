// The mesh of ranks: sizes, coordinates and groups, built once and passed down. The one place with rank arithmetic
// (contracts g).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/comm/process_group.h"

namespace megatron {

struct ParallelConfig : Config {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  int64_t expert_model_parallel_size = 1;
  bool sequence_parallel = false;
  bool use_tp_pp_dp_mapping = false;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

// All groups of ranks along the axes of `mask` ("tp", "dp-cp") for an order such as "tp-cp-ep-dp-pp", whose leftmost axis
// varies fastest; sizes are given per axis in that order. Pure arithmetic.
std::vector<std::vector<int>> rank_groups(const std::string& order, const std::vector<int>& sizes,
                                          const std::string& mask);

// The groups this rank belongs to. Default-constructed: one rank.
struct ParallelGroups {
  ProcessGroup world;
  ProcessGroup tp;
  ProcessGroup pp;
  ProcessGroup dp;
  ProcessGroup cp;
  ProcessGroup dp_cp;           // ranks that hold different tokens of the same weights
  ProcessGroup model_parallel;  // tp and pp: ranks that hold different parts of one model replica
};

}  // namespace megatron
