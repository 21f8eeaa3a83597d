#include "megatron/nn/reduction.h"

#include "megatron/nn/placement.h"

namespace megatron {
namespace {

void add_group(std::vector<const ProcessGroup*>& all, const ProcessGroup* group) {
  if (group != nullptr && group->size() > 1) all.push_back(group);
}

// Both grids end with the pipeline, so that their groups are equal when their tensor ranks are and
// experts are not divided.
bool experts_apart(const ParallelGroups& groups) {
  return groups.ep.size() > 1 || groups.etp.size() != groups.tp.size();
}

}  // namespace

AxisSet gradient_axes(const Placement& placement) {
  return placement.expert ? AxisSet{Axis::kExpertData} : AxisSet{Axis::kData, Axis::kContext};
}

AxisSet copy_axes(const Placement& placement) {
  const Axis tensor = placement.expert ? Axis::kExpertTensor : Axis::kTensor;
  return is_sharded_over(placement, tensor) ? AxisSet{} : AxisSet{tensor};
}

AxisSet model_axes(const Placement& placement) {
  return placement.expert ? AxisSet{Axis::kExpertTensor, Axis::kExpert, Axis::kPipeline}
                          : AxisSet{Axis::kTensor, Axis::kPipeline};
}

std::vector<Placement> reduction_domains(const ParallelGroups& groups) {
  std::vector<Placement> domains(experts_apart(groups) ? 2 : 1);
  if (domains.size() == 2) domains[1].expert = true;
  return domains;
}

size_t domain_of(const Placement& placement, const ParallelGroups& groups) {
  return placement.expert && experts_apart(groups) ? 1 : 0;
}

const ProcessGroup& gradient_group(const Placement& placement, const ParallelGroups& groups) {
  return groups.group(gradient_axes(placement));
}

std::vector<const ProcessGroup*> partial_groups(const Parameter& parameter,
                                                const ParallelGroups& groups) {
  std::vector<const ProcessGroup*> all;
  add_group(all, &groups.group(parameter.placement.partial_grad));
  add_group(all, parameter.shared);
  return all;
}

std::vector<const ProcessGroup*> copy_groups(const Parameter& parameter,
                                             const ParallelGroups& groups) {
  std::vector<const ProcessGroup*> all;
  add_group(all, &groups.group(copy_axes(parameter.placement)));
  add_group(all, parameter.shared);
  return all;
}

const ProcessGroup& norm_group(const Placement& placement, const ParallelGroups& groups) {
  return groups.group(model_axes(placement));
}

std::vector<const ProcessGroup*> shard_groups(const Placement& placement,
                                              const ParallelGroups& groups) {
  std::vector<const ProcessGroup*> all;
  for (const Shard& shard : placement.shards) add_group(all, &groups.group({shard.axis}));
  return all;
}

std::vector<const ProcessGroup*> use_groups(const Placement& placement,
                                            const ParallelGroups& groups) {
  std::vector<const ProcessGroup*> all;
  add_group(all, &gradient_group(placement, groups));
  for (const ProcessGroup* group : shard_groups(placement, groups)) all.push_back(group);
  return all;
}

ReplicaIndex replica_index(const std::vector<const ProcessGroup*>& groups) {
  ReplicaIndex place;
  for (const ProcessGroup* group : groups) {
    place.index = place.index * group->size() + group->rank();
    place.count *= group->size();
  }
  return place;
}

ReplicaIndex copy_index(const Parameter& parameter, const ParallelGroups& groups) {
  return replica_index(copy_groups(parameter, groups));
}

int replica_id(const Parameter& parameter, const ParallelGroups& groups, const ProcessGroup& data) {
  const ReplicaIndex copy = copy_index(parameter, groups);
  return data.rank() * copy.count + copy.index;
}

bool counts_in_norm(const Parameter& parameter, const ParallelGroups& groups) {
  return copy_index(parameter, groups).index == 0;
}

}  // namespace megatron
