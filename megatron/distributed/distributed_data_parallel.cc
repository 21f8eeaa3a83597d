#include "megatron/distributed/distributed_data_parallel.h"

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/distributed/shard_gather.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t num_elements(const Parameter& parameter) {
  return std::accumulate(parameter.local_shape.begin(), parameter.local_shape.end(), int64_t{1},
                         std::multiplies<>());
}

// Megatron's default: large enough for the bandwidth of the collective, growing with the ranks.
int64_t bucket_size(const DistributedDataParallelConfig& config, ShardingStrategy strategy,
                    int data_ranks, int64_t trained_elements) {
  if (strategy == ShardingStrategy::kOptimGradsParams || data_ranks == 1) return 0;
  if (config.ddp_bucket_size) return *config.ddp_bucket_size;
  if (config.ddp_num_buckets)
    return (trained_elements + *config.ddp_num_buckets - 1) / *config.ddp_num_buckets;
  // Gradients that are kept whole and reduced after the backward need no buckets.
  if (strategy != ShardingStrategy::kOptimGrads && !config.overlap_grad_reduce) return 0;
  return std::max<int64_t>(40'000'000, int64_t{1'000'000} * data_ranks);
}

// Logs once in a run, whatever the number of stores.
void log_gathering(const ShardGather& gather) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log_info(gather.copies() ? std::string("parameter all-gather: peer-to-peer copies (same host)")
                             : "parameter all-gather: collectives: " + gather.obstacle());
  });
}

bool is_shared(const Parameter& parameter) {
  return parameter.shared != nullptr && parameter.shared->size() > 1;
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
    : groups_(groups), dtype_(dtype) {
  layout_.groups = data;
  module.visit([&](const std::string& name, Parameter& parameter) {
    if (parameter.name.empty()) parameter.name = name;
    MEGATRON_CHECK(!parameter.placement.expert, "parameter ", parameter.name,
                   " belongs to an expert, which data parallelism does not support yet");
    const bool inserted =
        index_.emplace(&parameter, static_cast<int>(layout_.parameters.size())).second;
    MEGATRON_ASSERT(inserted, "parameter ", parameter.name, " is listed twice");
    layout_.parameters.push_back(&parameter);
  });
  const bool sharded = data.shard.size() > 1;
  shard_grads_ = sharded && config.strategy() >= ShardingStrategy::kOptimGrads;
  shard_values_ = sharded && config.strategy() == ShardingStrategy::kOptimGradsParams;
  overlap_grads_ = config.overlap_grad_reduce;
  overlap_values_ = sharded && config.overlap_param_gather;
  reduces_ = sharded || data.replica.size() > 1;
  plan(config);

  const auto value_options = at::TensorOptions().dtype(dtype).device(device);
  const auto grad_options = value_options.dtype(dtype == at::kDouble ? at::kDouble : at::kFloat);
  const GradReduction reduction{overlap_grads_, config.grad_reduce_in_bf16, config.peer_copies};
  const ValueGathering gathering{config.overlap_param_gather, config.peer_copies};
  values_ = shard_values_ ? make_sharded_values(layout_, value_options, gathering)
                          : make_whole_values(layout_, value_options, gathering);
  if (sharded && config.peer_copies && device.is_cuda()) log_gathering(values_->gather());
  grads_ = shard_grads_ ? make_sharded_grads(layout_, grad_options, reduction)
                        : make_whole_grads(layout_, grad_options, reduction);
  for (Parameter* parameter : layout_.parameters) parameter->store = this;
  make_shards();
  make_partial_sums();
  std::vector<const Parameter*> scaled;
  for (const Parameter* parameter : layout_.parameters)
    if (parameter->delayed_scaling) scaled.push_back(parameter);
  if (!scaled.empty())
    scaling_ = std::make_unique<DelayedScaling>(std::move(scaled), groups, device);
}

DistributedDataParallel::~DistributedDataParallel() {
  for (Parameter* parameter : layout_.parameters) {
    if (parameter->store == this) parameter->store = nullptr;
  }
}

void DistributedDataParallel::plan(const DistributedDataParallelConfig& config) {
  std::vector<BufferParameter> parameters;
  std::vector<std::string> names;
  for (const Parameter* parameter : layout_.parameters) names.push_back(parameter->name);
  const std::vector<int> units = sharding_units(names);
  int64_t trained_elements = 0;
  for (const Parameter* parameter : layout_.parameters) {
    const bool embedding = parameter->role == ParameterRole::kEmbedding,
               tied = embedding && parameter->uses > 1;
    parameters.push_back({num_elements(*parameter), tied || is_shared(*parameter),
                          shard_values_ ? units[parameters.size()] : 0, !parameter->trainable,
                          embedding});
    if (parameter->trainable) trained_elements += parameters.back().num_elements;
  }
  BufferOptions options;
  options.num_shards = layout_.groups.shard.size();
  options.shard_alignment = config.ddp_pad_buckets_for_high_nccl_busbw ? 65536 : 128;
  const int data_ranks = layout_.groups.shard.size() * layout_.groups.replica.size();
  const ShardingStrategy strategy =
      options.num_shards > 1 ? config.strategy() : ShardingStrategy::kNoShard;
  options.bucket_size = bucket_size(config, strategy, data_ranks, trained_elements);
  layout_.buffer = plan_buffer(parameters, options);

  // Buckets are reduced in buffer order, those of tied embeddings at the end.
  std::vector<int> order, last, uses;
  std::vector<std::vector<int>> members;
  for (int bucket = 0; bucket < layout_.num_buckets(); ++bucket) {
    const BufferBucket& range = layout_.buffer.buckets[bucket];
    members.emplace_back();
    if (range.frozen) continue;
    (range.own ? last : order).push_back(bucket);
    members.back() = range.parameters;
  }
  order.insert(order.end(), last.begin(), last.end());
  for (const Parameter* parameter : layout_.parameters) uses.push_back(parameter->uses);
  sequence_ =
      std::make_unique<BucketSequence>(std::move(order), std::move(members), std::move(uses));
}

void DistributedDataParallel::make_shards() {
  int64_t value_end = -1, grad_end = -1;
  for (int bucket = 0; bucket < layout_.num_buckets(); ++bucket) {
    const int64_t count = layout_.shard_elements(bucket);
    const bool frozen = layout_.buffer.buckets[bucket].frozen;
    const int64_t value_begin = values_->own_begin(bucket);
    const int64_t grad_begin = frozen ? -1 : grads_->own_begin(bucket);
    const bool continues = !shards_.empty() && shards_.back().trained() != frozen &&
                           value_begin == value_end && (frozen || grad_begin == grad_end);
    if (!continues) shards_.emplace_back();
    FlatShard& shard = shards_.back();
    const int64_t before = continues ? shard.values.numel() : 0;
    value_end = value_begin + count;
    grad_end = grad_begin + count;
    shard.values = values_->flat().narrow(0, value_begin - before, before + count);
    if (!frozen) shard.grads = grads_->flat().narrow(0, grad_begin - before, before + count);
    // offset in the buffer
    const int64_t first = layout_.bucket_begin(bucket) + layout_.shard_begin(bucket);
    for (int index : layout_.buffer.buckets[bucket].parameters) {
      const BufferSlot& slot = layout_.buffer.slots[index];
      const int64_t begin = std::max(slot.begin, first), end = std::min(slot.end, first + count);
      if (begin >= end) continue;
      shard.slots.push_back({layout_.parameters[index], index, before + begin - first,
                             begin - slot.begin, end - slot.begin});
    }
  }
}

int DistributedDataParallel::index_of(const Parameter& parameter) const {
  const auto found = index_.find(&parameter);
  MEGATRON_ASSERT(found != index_.end(), "parameter ", parameter.name, " is not in this store");
  return found->second;
}

at::Tensor DistributedDataParallel::acquire(Parameter& parameter) {
  return values_->acquire(index_of(parameter));
}

void DistributedDataParallel::release(Parameter& parameter) {
  values_->release(index_of(parameter));
}

void DistributedDataParallel::new_values(bool frozen_too) {
  ++values_version_;
  values_->changed(frozen_too);
}

const DelayedScales* DistributedDataParallel::delayed_scales(const Parameter& weight) {
  return scaling_ && weight.delayed_scaling ? &scaling_->scales(weight) : nullptr;
}

void DistributedDataParallel::update_delayed_scales() {
  if (scaling_) scaling_->update();
}

std::vector<StateTensor> DistributedDataParallel::delayed_scaling_state() const {
  std::vector<StateTensor> all;
  if (!scaling_) return all;
  for (size_t i = 0; i < scaling_->weights().size(); ++i) {
    const std::string& name = scaling_->weights()[i]->name;
    StateTensor entry;
    entry.data = scaling_->state(i);
    entry.description.key = "fp8." + name.substr(0, name.rfind(".weight"));
    entry.description.dtype = DType::kFloat32;
    entry.description.global_shape = entry.description.local_shape = entry.data.sizes().vec();
    entry.description.flat_end = entry.data.numel();
    entry.description.replica_id = replica_index(scaling_->ranks()).index;
    entry.data = entry.data.view({-1});
    all.push_back(std::move(entry));
  }
  return all;
}

void DistributedDataParallel::delayed_scales_loaded() {
  if (scaling_) scaling_->loaded();
}

GradTarget DistributedDataParallel::grad_target(Parameter& parameter) {
  MEGATRON_ASSERT(in_step_ || !shard_grads_, "zero_grad() begins a step");
  MEGATRON_ASSERT(parameter.trainable, parameter.name, " is frozen and takes no gradient");
  return grads_->target(index_of(parameter));
}

void DistributedDataParallel::grad_ready(Parameter& parameter) {
  if (recorded_ != nullptr) return recorded_->push_back(&parameter);
  if (!in_step_) return;
  const bool too_often = sequence_->report(index_of(parameter));
  MEGATRON_ASSERT(!too_often, "gradient of ", parameter.name,
                  " was reported more often than this step's passes use it");
  if (!shard_grads_ && !overlap_grads_) return;
  while (const std::optional<int> bucket = sequence_->next_ready())
    grads_->reduce(*bucket, sequence_->in_last_round());
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
  grads_->zero();
  if (scaling_) scaling_->restart();
  in_step_ = true;
  // Sharded gradients are reduced after every pass, whole ones after all of them.
  sequence_->restart(shard_grads_ ? passes : 1, shard_grads_ ? 1 : passes);
}

void DistributedDataParallel::finish_grad_sync() {
  const bool alone = layout_.groups.shard.size() == 1 && layout_.groups.replica.size() == 1;
  MEGATRON_ASSERT(in_step_ || alone, "zero_grad() begins a step");
  while (const std::optional<int> bucket = sequence_->next_left())
    grads_->reduce(*bucket, sequence_->in_last_round());
  grads_->finish();
  sum_partial_gradients();
  values_->free_unused();
  values_->will_change();
  in_step_ = false;
}

void DistributedDataParallel::make_partial_sums() {
  // Stages that share a parameter come last, so that all ranks of a stage have one order.
  std::vector<const ProcessGroup*> all, shared;
  for (const Parameter* parameter : layout_.parameters) {
    for (const ProcessGroup* group : partial_groups(*parameter, groups_)) {
      std::vector<const ProcessGroup*>& known = group == parameter->shared ? shared : all;
      if (std::find(known.begin(), known.end(), group) == known.end()) known.push_back(group);
    }
  }
  all.insert(all.end(), shared.begin(), shared.end());
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
  values_->edit(visitor);
}

void DistributedDataParallel::initialize(int64_t seed) {
  edit_values([&](Parameter& parameter) { initialize_parameter(parameter, seed, groups_); });
}

std::vector<StateTensor> DistributedDataParallel::state() const {
  return describe("", dtype_, /*trainable_only=*/false, [this](size_t shard, const FlatSlot& slot) {
    return shards_[shard].values.narrow(0, slot.begin, slot.num_elements());
  });
}

std::vector<StateTensor> DistributedDataParallel::describe(
    const std::string& prefix, at::ScalarType type, bool trainable_only,
    const std::function<at::Tensor(size_t, const FlatSlot&)>& part) const {
  std::vector<StateTensor> all;
  const at::Tensor nothing = at::empty({0}, values_->flat().options().dtype(type));
  std::vector<int> entry_of(layout_.parameters.size(), -1);
  for (size_t i = 0; i < layout_.parameters.size(); ++i) {
    const Parameter& parameter = *layout_.parameters[i];
    if (trainable_only && !parameter.trainable) continue;
    StateTensor entry;
    entry.data = nothing;
    entry.description = sharded_tensor(parameter, groups_, prefix + parameter.name, entry.data);
    entry.description.data = nullptr;
    entry.description.flat_begin = entry.description.flat_end = 0;
    entry.copy = copy_index(parameter, groups_).index;
    entry.description.replica_id = replica_id(parameter, groups_, layout_.groups.replica);
    entry.replicas = &layout_.groups.replica;
    entry.device = values_->flat().device();
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
  return grads_->view(index_of(parameter));
}

}  // namespace megatron
