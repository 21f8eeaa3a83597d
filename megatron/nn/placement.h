// What follows from a Placement: the boxes of the global tensor that a rank holds, and its initial
// random values.
#pragma once

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/module.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// The rank's position and the size along an axis.
struct AxisPosition {
  int rank = 0;
  int size = 1;
};
AxisPosition axis_position(const ParallelGroups& groups, Axis axis);

// The shape of the whole tensor without padded rows.
std::vector<int64_t> logical_shape(const Parameter& parameter);

// The pieces of the logical (unpadded) global tensor that this rank's local tensor holds.
std::vector<ShardPiece> shard_pieces(const Parameter& parameter, const ParallelGroups& groups);

// A range of the flattened local tensor that is also contiguous in the flattened logical tensor.
struct PlacedRun {
  int64_t begin, end;   // in the local tensor
  int64_t first_place;  // in the logical tensor
};
// The pieces as such ranges, each as long as it can be.
std::vector<PlacedRun> placed_runs(const Parameter& parameter, const ParallelGroups& groups);

// Describes a tensor shaped like the parameter (its value, master weight or moment), under `key`.
// `data` must be host memory by the time the description is written or read.
ShardedTensor sharded_tensor(const Parameter& parameter, const ParallelGroups& groups,
                             std::string key, const at::Tensor& local);

// Describes state that is no parameter (Module::visit_state), which all ranks of the stage hold.
ShardedTensor sharded_state(const at::Tensor& state, const ParallelGroups& groups, std::string key);

// Whether a dimension is divided over the axis; kModel divides over kTensor and kPipeline.
bool is_sharded_over(const Placement& placement, Axis axis);

// Initialises the parameter, which must have a name and memory, from the seed. Random numbers are
// position-keyed, so that the result is independent of the layout.
void initialize_parameter(Parameter& parameter, int64_t seed, const ParallelGroups& groups);

// The same for every parameter of a module, by its names in the module.
void initialize_parameters(Module& module, int64_t seed, const ParallelGroups& groups);

}  // namespace megatron
