// What the placement of a parameter says about its gradient and its copies. The only place that
// decides over which ranks a gradient is summed, which ranks hold copies, and which of them counts
// in norms and is stored: stores, optimizers, checkpoints, hashes and plans ask here.
//
//                            parameters of experts    all others
//   gradient_axes            expert data              data, context
//   copy_axes                expert tensor            tensor           unless it is divided over it
//   model_axes               expert tensor, expert,   tensor, pipeline
//                            pipeline
//
// A layer, and so each of its parameters, exists on one stage; an expert, on one expert rank. A
// parameter that several stages share (Parameter::shared) has copies on these, whose gradients are
// parts of one sum.
#pragma once

#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter.h"

namespace megatron {

// Of the ranks that compute with the same part of the parameter on different tokens.
AxisSet gradient_axes(const Placement& placement);
// Of the ranks that hold the same part and compute with it on the same samples.
AxisSet copy_axes(const Placement& placement);
// Of the ranks that together hold one copy of all parameters placed like this one.
AxisSet model_axes(const Placement& placement);

// Parameters whose gradients are summed over the same ranks form a reduction domain. A placement of
// each: the first of dense weights, and the second of experts where their grid has other groups.
std::vector<Placement> reduction_domains(const ParallelGroups& groups);
// The number of the domain of a placement there.
size_t domain_of(const Placement& placement, const ParallelGroups& groups);

// The group over which gradients are summed.
const ProcessGroup& gradient_group(const Placement& placement, const ParallelGroups& groups);
// The groups of several ranks over which a gradient is partial beyond that: those along the axes of
// partial_grad, then the stages that share the parameter.
std::vector<const ProcessGroup*> partial_groups(const Parameter& parameter,
                                                const ParallelGroups& groups);
// The groups of several ranks that hold copies, apart from gradient_group: along copy_axes, then
// the stages that share the parameter.
std::vector<const ProcessGroup*> copy_groups(const Parameter& parameter,
                                             const ParallelGroups& groups);
// The group over which a norm is summed after the shards of one copy, each element counting on one
// rank (counts_in_norm).
const ProcessGroup& norm_group(const Placement& placement, const ParallelGroups& groups);
// The groups of several ranks that the parameter is divided over.
std::vector<const ProcessGroup*> shard_groups(const Placement& placement,
                                              const ParallelGroups& groups);
// The groups of several ranks that compute with any part of the parameter: gradient_group and
// shard_groups. What is measured around the whole parameter is joined over all of them.
std::vector<const ProcessGroup*> use_groups(const Placement& placement,
                                            const ParallelGroups& groups);

// A place among the ranks of several groups; the last group varies fastest.
struct ReplicaIndex {
  int index = 0;
  int count = 1;
};
ReplicaIndex replica_index(const std::vector<const ProcessGroup*>& groups);

// Of this rank's copy among those on copy_groups, and among all ranks that hold the same elements,
// `data` being those of them in gradient_group. The rank of replica 0 stores the elements.
ReplicaIndex copy_index(const Parameter& parameter, const ParallelGroups& groups);
int replica_id(const Parameter& parameter, const ParallelGroups& groups, const ProcessGroup& data);

// Whether this rank's elements count in norms and sums over the whole model: those of the first
// copy do.
bool counts_in_norm(const Parameter& parameter, const ParallelGroups& groups);

}  // namespace megatron
