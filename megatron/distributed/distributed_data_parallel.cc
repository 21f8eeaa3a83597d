#include "megatron/distributed/distributed_data_parallel.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/distributed/shard_gather.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Logs once in a run, whatever the number of stores.
void log_gathering(const ShardGather& gather) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log_info(gather.copies() ? std::string("parameter all-gather: peer-to-peer copies (same host)")
                             : "parameter all-gather: collectives: " + gather.obstacle());
  });
}

// Views of this rank's gradients of the parameters chosen by `wanted`, in buffer order.
template <class Wanted>
std::vector<at::Tensor> chosen_grads(const std::vector<FlatShard>& shards, const Wanted& wanted) {
  std::vector<at::Tensor> chosen;
  for (const FlatShard& shard : shards) {
    if (!shard.trained()) continue;
    for (const FlatSlot& slot : shard.slots) {
      if (wanted(*slot.parameter))
        chosen.push_back(shard.grads.narrow(0, slot.begin, slot.num_elements()));
    }
  }
  return chosen;
}

// Sums each of the parts over the group, by one all-reduce.
void sum_together(const std::vector<at::Tensor>& parts, const ProcessGroup& group) {
  if (parts.size() == 1) return group.all_reduce(parts.front())->wait();
  const at::Tensor together = at::cat(parts);
  group.all_reduce(together)->wait();
  int64_t begin = 0;
  for (const at::Tensor& part : parts) {
    part.copy_(together.narrow(0, begin, part.numel()));
    begin += part.numel();
  }
}

// Stages have the tables that they share in different places and chunks of their models, so that
// these are summed in the order of their names.
void sum_shared(std::vector<SharedGrad> all) {
  std::ranges::stable_sort(all, {}, [](const SharedGrad& part) {
    return cat(part.group->name(), " ", part.parameter->name);
  });
  for (size_t first = 0, end = 0; first < all.size(); first = end) {
    std::vector<at::Tensor> parts;
    for (; end < all.size() && all[end].group == all[first].group; ++end)
      parts.push_back(all[end].grad);
    sum_together(parts, *all[first].group);
  }
}

// The state of this rank's experts is its part of dimension 0.
void divide_over_experts(const ParallelGroups& groups, ShardedTensor& state) {
  const AxisPosition place = axis_position(groups, Axis::kExpert);
  state.global_shape[0] *= place.size;
  std::vector<int64_t> offset(state.local_shape.size(), 0);
  const std::vector<int64_t> start = offset;
  offset[0] = place.rank * state.local_shape[0];
  state.pieces = {{{offset, state.local_shape}, start}};
}

}  // namespace

DistributedDataParallel::DistributedDataParallel(Module& module, const ParallelGroups& groups,
                                                 at::ScalarType dtype, at::Device device,
                                                 const DistributedDataParallelConfig& config)
    : DistributedDataParallel(module, groups, dtype, device, config,
                              make_data_parallel_groups(groups, config)) {}

DistributedDataParallel::DistributedDataParallel(Module& module, const ParallelGroups& groups,
                                                 at::ScalarType dtype, at::Device device,
                                                 const DistributedDataParallelConfig& config,
                                                 const DataParallelGroups& data)
    : groups_(groups), dtype_(dtype), data_(data) {
  std::vector<std::vector<int>> members(data.size());  // by domain
  module.visit([&](const std::string& name, Parameter& parameter) {
    if (parameter.name.empty()) parameter.name = name;
    const bool inserted = places_.emplace(&parameter, Place{}).second;
    MEGATRON_ASSERT(inserted, "parameter ", parameter.name, " is listed twice");
    members.at(domain_of(parameter.placement, groups))
        .push_back(static_cast<int>(parameters_.size()));
    parameters_.push_back(&parameter);
  });
  module.visit_state([&](const std::string& name, at::Tensor& state) {
    state = state.to(device);
    states_.emplace_back(name, &state);
  });
  for (size_t k = 0; k < data.size(); ++k) {
    if (k > 0 && members[k].empty()) continue;  // the first gives types and devices
    std::vector<Parameter*> parameters;
    for (const int place : members[k])
      parameters.push_back(parameters_[static_cast<size_t>(place)]);
    domains_.push_back(std::make_unique<ReductionDomain>(static_cast<int>(k), std::move(parameters),
                                                         std::move(members[k]), groups, data[k],
                                                         dtype, device, config));
    ReductionDomain& domain = *domains_.back();
    for (size_t i = 0; i < domain.layout.parameters.size(); ++i)
      places_[domain.layout.parameters[i]] = {&domain, static_cast<int>(i)};
    const bool sharded = data[k].shard.size() > 1;
    if (sharded && config.peer_copies && device.is_cuda()) log_gathering(domain.values->gather());
    shard_grads_ = shard_grads_ || domain.shard_grads;
    shard_values_ = shard_values_ || domain.shard_values;
    overlap_values_ = overlap_values_ || domain.overlap_values;
    reduces_ = reduces_ || sharded || data[k].replica.size() > 1;
  }
  overlap_grads_ = config.overlap_grad_reduce;
  for (Parameter* parameter : parameters_) parameter->store = this;
  for (const bool frozen : {false, true})
    for (const auto& domain : domains_) domain->add_shards(frozen, shards_);
  make_partial_sums();
}

DistributedDataParallel::~DistributedDataParallel() {
  for (Parameter* parameter : parameters_) {
    if (parameter->store == this) parameter->store = nullptr;
  }
}

const DistributedDataParallel::Place& DistributedDataParallel::place_of(
    const Parameter& parameter) const {
  const auto found = places_.find(&parameter);
  MEGATRON_ASSERT(found != places_.end(), "parameter ", parameter.name, " is not in this store");
  return found->second;
}

at::Tensor DistributedDataParallel::acquire(Parameter& parameter) {
  const Place& place = place_of(parameter);
  return place.domain->values->acquire(place.index);
}

void DistributedDataParallel::release(Parameter& parameter) {
  const Place& place = place_of(parameter);
  place.domain->values->release(place.index);
}

void DistributedDataParallel::new_values(bool frozen_too) {
  ++values_version_;
  for (const auto& domain : domains_) domain->values->changed(frozen_too);
}

const DelayedScales* DistributedDataParallel::delayed_scales(const Parameter& weight) {
  if (!weight.delayed_scaling) return nullptr;
  return &place_of(weight).domain->scaling_of(weight).scales(weight);
}

void DistributedDataParallel::update_delayed_scales() {
  for (const auto& domain : domains_)
    for (const auto* scaling : {&domain->scaling, &domain->expert_scaling})
      if (*scaling) (*scaling)->update();
}

std::vector<StateTensor> DistributedDataParallel::delayed_scaling_state() const {
  std::vector<StateTensor> all;
  for (Parameter* parameter : parameters_) {
    if (!parameter->delayed_scaling) continue;
    const DelayedScaling& scaling = place_of(*parameter).domain->scaling_of(*parameter);
    const std::string& name = parameter->name;
    StateTensor entry;
    entry.data = scaling.state(*parameter);
    entry.description.key = "fp8." + name.substr(0, name.rfind(".weight"));
    entry.description.dtype = DType::kFloat32;
    entry.description.global_shape = entry.description.local_shape = entry.data.sizes().vec();
    entry.description.flat_end = entry.data.numel();
    if (parameter->placement.expert) divide_over_experts(groups_, entry.description);
    entry.description.replica_id = replica_index(scaling.ranks()).index;
    entry.data = entry.data.view({-1});
    all.push_back(std::move(entry));
  }
  return all;
}

void DistributedDataParallel::delayed_scales_loaded() {
  for (const auto& domain : domains_)
    for (const auto* scaling : {&domain->scaling, &domain->expert_scaling})
      if (*scaling) (*scaling)->loaded();
}

GradTarget DistributedDataParallel::grad_target(Parameter& parameter) {
  MEGATRON_ASSERT(in_step_ || !shard_grads_, "zero_grad() begins a step");
  MEGATRON_ASSERT(parameter.trainable, parameter.name, " is frozen and takes no gradient");
  const Place& place = place_of(parameter);
  return place.domain->grads->target(place.index);
}

void DistributedDataParallel::grad_ready(Parameter& parameter) {
  if (recorded_ != nullptr) return recorded_->push_back(&parameter);
  if (!in_step_) return;
  const Place& place = place_of(parameter);
  place.domain->grad_ready(place.index);
}

std::vector<Parameter*> DistributedDataParallel::record_gradients(
    const std::function<void()>& pass) {
  MEGATRON_ASSERT(!shard_grads_, "sharded gradients lie elsewhere in every pass");
  std::vector<Parameter*> reported;
  recorded_ = &reported;
  try {
    pass();
  } catch (...) {
    recorded_ = nullptr;
    throw;
  }
  recorded_ = nullptr;
  return reported;
}

bool DistributedDataParallel::defer(std::function<void()> weight_gradient) {
  if (deferred_ == nullptr) return false;
  deferred_->push_back(std::move(weight_gradient));
  return true;
}

void DistributedDataParallel::zero_grad(int64_t passes) {
  MEGATRON_ASSERT(passes >= 1, "a step of ", passes, " passes");
  for (const auto& domain : domains_) domain->zero_grad(passes);
  in_step_ = true;
}

void DistributedDataParallel::finish_grad_sync(std::span<DistributedDataParallel* const> chunks) {
  std::vector<SharedGrad> shared;
  for (DistributedDataParallel* chunk : chunks) {
    MEGATRON_ASSERT(chunk->in_step_ || !chunk->reduces_, "zero_grad() begins a step");
    for (const auto& domain : chunk->domains_) domain->finish_grad_sync();
    chunk->sum_partial_gradients();
    shared.insert(shared.end(), chunk->shared_grads_.begin(), chunk->shared_grads_.end());
  }
  sum_shared(std::move(shared));
  for (DistributedDataParallel* chunk : chunks) {
    for (const auto& domain : chunk->domains_) domain->values->free_unused();
    chunk->values_will_change();
    chunk->in_step_ = false;
  }
}

void DistributedDataParallel::make_partial_sums() {
  std::vector<const ProcessGroup*> all;
  for (const Parameter* parameter : parameters_) {
    for (const ProcessGroup* group : partial_groups(*parameter, groups_)) {
      if (group == parameter->shared) {
        for (const at::Tensor& part :
             chosen_grads(shards_, [&](const Parameter& other) { return &other == parameter; }))
          shared_grads_.push_back({group, parameter, part});
      } else if (std::find(all.begin(), all.end(), group) == all.end()) {
        all.push_back(group);
      }
    }
  }
  for (const ProcessGroup* group : all) {
    std::vector<at::Tensor> parts = chosen_grads(shards_, [&](const Parameter& parameter) {
      const std::vector<const ProcessGroup*> over = partial_groups(parameter, groups_);
      return std::find(over.begin(), over.end(), group) != over.end();
    });
    if (!parts.empty()) partial_sums_.emplace_back(group, std::move(parts));
  }
}

void DistributedDataParallel::sum_partial_gradients() {
  for (const auto& [group, parts] : partial_sums_) sum_together(parts, *group);
}

void DistributedDataParallel::edit_values(const std::function<void(Parameter&)>& visitor) {
  const at::NoGradGuard no_grad;
  ++values_version_;
  for (const auto& domain : domains_) domain->values->edit(visitor);
}

void DistributedDataParallel::initialize(int64_t seed) {
  edit_values([&](Parameter& parameter) { initialize_parameter(parameter, seed, groups_); });
}

std::vector<StateTensor> DistributedDataParallel::state() const {
  std::vector<StateTensor> all = describe(
      "", [this](const Parameter& parameter) { return value_type(parameter, dtype_); },
      [this](size_t shard, const FlatSlot& slot) {
        return shards_[shard].values.narrow(0, slot.begin, slot.num_elements());
      });
  for (const auto& [name, state] : states_) {
    StateTensor entry;
    entry.description = sharded_state(*state, groups_, name);
    entry.description.data = nullptr;
    entry.description.flat_end = state->numel();
    entry.data = state->view({-1});
    entry.device = flat_values().device();
    all.push_back(std::move(entry));
  }
  return all;
}

std::vector<StateTensor> DistributedDataParallel::describe(
    const std::string& prefix,
    const std::function<std::optional<at::ScalarType>(const Parameter&)>& type_of,
    const std::function<at::Tensor(size_t, const FlatSlot&)>& part) const {
  std::vector<StateTensor> all;
  std::vector<int> entry_of(parameters_.size(), -1);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = *parameters_[i];
    const std::optional<at::ScalarType> type = type_of(parameter);
    if (!type) continue;
    StateTensor entry;
    entry.data = at::empty({0}, flat_values().options().dtype(*type));
    entry.description = sharded_tensor(parameter, groups_, prefix + parameter.name, entry.data);
    entry.description.data = nullptr;
    entry.description.flat_begin = entry.description.flat_end = 0;
    entry.copy = copy_index(parameter, groups_).index;
    entry.description.replica_id = replica_id(parameter, groups_, data_grid(parameter).replica);
    entry.replicas = &data_grid(parameter).replica;
    entry.device = flat_values().device();
    entry_of[i] = static_cast<int>(all.size());
    all.push_back(std::move(entry));
  }
  for (size_t k = 0; k < shards_.size(); ++k) {
    for (const FlatSlot& slot : shards_[k].slots) {
      if (entry_of[slot.index] < 0) continue;
      StateTensor& entry = all[entry_of[slot.index]];
      entry.data = part(k, slot);
      entry.description.flat_begin = slot.flat_begin;
      entry.description.flat_end = slot.flat_end;
    }
  }
  return all;
}

at::Tensor DistributedDataParallel::grad(const Parameter& parameter) const {
  MEGATRON_ASSERT(!shard_grads_, "the gradient of ", parameter.name, " is sharded");
  MEGATRON_ASSERT(parameter.trainable, parameter.name, " is frozen and has no gradient");
  const Place& place = place_of(parameter);
  return place.domain->grads->view(place.index);
}

}  // namespace megatron
