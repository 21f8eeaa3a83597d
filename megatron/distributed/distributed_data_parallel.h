// Owns a model chunk's weights and gradients, replicated or sharded, and sums gradients over the
// ranks that process different tokens.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "megatron/distributed/reduction_domain.h"
#include "megatron/nn/module.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// This rank's part of the gradient of a parameter that several stages hold.
struct SharedGrad {
  const ProcessGroup* group = nullptr;
  const Parameter* parameter = nullptr;
  at::Tensor grad;
};

// A tensor of a checkpoint: the part that this rank holds, and its memory. `description.data` is
// not set; write to `data` to load.
struct StateTensor {
  ShardedTensor description;
  at::Tensor data;  // [description.flat_end - description.flat_begin], a view
  // The data ranks that hold the same part and share the work of writing and reading it; null if it
  // is too small to divide. Other such groups may hold copies of the part (tensor ranks that
  // replicate the tensor, stages that share it); the one whose `copy` is 0 writes.
  const ProcessGroup* replicas = nullptr;
  int copy = 0;
  at::Device device = at::kCPU;  // for collectives over `replicas`; `data` may be on the host
};

// Gradients are summed, never averaged: losses are (sum, weight) pairs and the optimizer divides
// once by the weight of the whole step.
//
// A step: zero_grad(passes); that many backward passes; finish_grad_sync(); Optimizer::step(),
// which calls values_changed(). Buckets are reduced in one fixed order, as they fill or at the end,
// so that every rank issues the same collectives even if it used other parameters.
//
// Frozen parameters (Parameter::trainable, read by the constructor) have values but no gradients.
//
// Parameters that keep fp32 values (Parameter::keeps_fp32) have buckets of their own, and no master
// weights beside the values.
//
// What is sharded over a group of s ranks, and bytes per parameter with bf16 values and fp32 Adam
// states:
//   no_shard            nothing                              18
//   optim               master weights, moments              6 + 12/s
//   optim_grads         and main gradients                   2 + 16/s, plus 4 for the buckets being
//                                                            filled
//   optim_grads_params  and values                           18/s, plus 2 for one or two gathered
//                                                            layers, and buckets as above
//
// Communication per step, for a group of s and P parameters; r ranks hold each shard:
//   no_shard            all-reduce of the gradients over gradient_group
//   optim               reduce-scatter of the gradients, all-gather of the values
//   optim_grads         reduce-scatter of the gradients per pass (embeddings: once), all-gather of
//                       the values
//   optim_grads_params  as optim_grads; values are all-gathered in each forward and each backward
//   r > 1               all-reduce of the shard of the gradients over its r ranks, once
//   Parameters with partial gradients: one all-reduce over each of partial_groups, of this rank's
//   shards of them all (over the tensor ranks: norms; over the first and last stage: a tied table).
//   They follow the sum over the data ranks: the order does not matter, the tensors are s times
//   smaller by then, and no bucket waits for another group.
// nn/reduction.h says which groups these are. Parameters of one reduction domain have buckets of
// their own; there is a second domain where experts are divided over ranks.
// Source: Rajbhandari et al. 2020 (arXiv:1910.02054); Zhao et al. 2023 (arXiv:2304.11277) for
// instances and prefetching.
//
// Not thread safe. Keeps references to module and groups, which must outlive it.
class DistributedDataParallel final : public ParameterStore {
 public:
  // Allocates values (zeros) and gradients of every parameter of `module`, names unnamed
  // parameters, and attaches itself as their store. With optim_grads_params a bucket is a layer or
  // a module outside the layers. `data` is derived from the groups if not given.
  DistributedDataParallel(Module& module, const ParallelGroups& groups, at::ScalarType dtype,
                          at::Device device, const DistributedDataParallelConfig& config = {});
  DistributedDataParallel(Module& module, const ParallelGroups& groups, at::ScalarType dtype,
                          at::Device device, const DistributedDataParallelConfig& config,
                          const DataParallelGroups& data);
  ~DistributedDataParallel() override;
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  at::Tensor acquire(Parameter& parameter) override;
  void release(Parameter& parameter) override;
  GradTarget grad_target(Parameter& parameter) override;
  void grad_ready(Parameter& parameter) override;
  bool defer(std::function<void()> weight_gradient) override;
  bool defers() const override { return deferred_ != nullptr; }

  // Whether passes of a step overlap with collectives of this store, which they start or wait for
  // bucket by bucket.
  bool gathers_under_first_pass() const { return overlap_values_; }
  bool reduces_under_last_pass() const { return overlap_grads_ && reduces_; }

  // Runs `pass` under graph capture and returns the parameters whose gradients it reported, in
  // order. Whoever replays the graph must report them: grad_target() and grad_ready() of each. Not
  // with sharded gradients.
  std::vector<Parameter*> record_gradients(const std::function<void()>& pass);

  int64_t values_version() const override { return shard_values_ ? -1 : values_version_; }
  bool communicates_in_passes() const override {
    return shard_values_ || (reduces_ && (shard_grads_ || overlap_grads_));
  }
  // Invalidates what layers cache that was computed from the values, such as quantised weights.
  void forget_what_is_kept() { ++values_version_; }
  const DelayedScales* delayed_scales(const Parameter& weight) override;

  // While a queue is set, weight gradients are appended to it instead of being computed. Null:
  // computed at once.
  void defer_weight_gradients_to(std::vector<std::function<void()>>* queue) { deferred_ = queue; }

  // Starts a step: zeroes the gradients; `passes` backward passes follow.
  void zero_grad(int64_t passes = 1);
  // Waits until this rank's gradients are sums over all ranks. Once per step, after the last
  // backward. Collective.
  void finish_grad_sync() {
    DistributedDataParallel* const alone[] = {this};
    finish_grad_sync(alone);
  }
  // The same of all chunks of a rank. Tables that several stages share may lie in different chunks
  // of these.
  static void finish_grad_sync(std::span<DistributedDataParallel* const> chunks);

  // Call before writing this rank's shards, and so before every values_changed(): waits until no
  // peer reads them (Note [Peer copies] in shard_gather.h). finish_grad_sync() includes it.
  // Collective.
  void values_will_change() {
    for (const auto& domain : domains_) domain->values->will_change();
  }
  // Call after writing this rank's shards. Starts the all-gather of the new values; with
  // overlap_param_gather it returns at once and acquire() waits per bucket. Collective.
  void values_changed() { new_values(/*frozen_too=*/true); }
  // The same if frozen values have not changed.
  void trained_values_changed() { new_values(/*frozen_too=*/false); }
  // Waits for these gathers. Needed before Parameter::value is read directly; acquire() waits for
  // what it returns.
  void finish_param_sync() {
    for (const auto& domain : domains_) domain->values->finish();
  }
  // Calls the visitor with every parameter, its whole value gathered; what the visitor writes
  // becomes the value. Collective; every rank must write the same.
  void edit_values(const std::function<void(Parameter&)>& visitor);
  // edit_values() with initialize_parameter().
  void initialize(int64_t seed);

  // End of a step with delayed scaling: takes the maximum of the amax values over the tensor, data
  // and context ranks, of experts over the ranks that hold them, and computes the next scales.
  // Collective; does nothing without delayed scaling.
  void update_delayed_scales();
  // The state of delayed scaling as checkpoints store it, "fp8.<linear>" with rows for input,
  // weight and output gradient: the scale, then the amax history; of experts such rows of each of
  // them. Call delayed_scales_loaded() after a load.
  std::vector<StateTensor> delayed_scaling_state() const;
  void delayed_scales_loaded();

  // What this rank holds; the trained ones, which the optimizer updates, come first.
  const std::vector<FlatShard>& shards() const { return shards_; }
  // The model's weights as checkpoints store them: one entry per parameter, of which this rank may
  // hold nothing; then the module's state that is no parameter. Call values_changed() after a load.
  std::vector<StateTensor> state() const;
  // The same for other tensors, laid out like the values, of the parameters for which `type_of`
  // gives a type: keys are prefix + name, and `part` returns the elements of a slot of the shard
  // with that index.
  std::vector<StateTensor> describe(
      const std::string& prefix,
      const std::function<std::optional<at::ScalarType>(const Parameter&)>& type_of,
      const std::function<at::Tensor(size_t shard, const FlatSlot&)>& part) const;

  // The gradient of a parameter, shaped like its value: a view. Not with sharded gradients.
  at::Tensor grad(const Parameter& parameter) const;
  bool shards_values() const { return shard_values_; }  // this rank keeps only its shards
  // Of the first domain, dense weights.
  const at::Tensor& flat_values() const { return domains_.front()->values->flat(); }
  const at::Tensor& flat_grads() const { return domains_.front()->grads->flat(); }
  const BufferLayout& layout() const { return domains_.front()->layout.buffer; }
  const std::vector<Parameter*>& parameters() const { return parameters_; }  // model order
  const ParallelGroups& groups() const { return groups_; }
  const DataParallelGroups& data_groups() const { return data_; }
  // That of the parameter's domain.
  const DataGrid& data_grid(const Parameter& parameter) const {
    return place_of(parameter).domain->layout.groups;
  }
  at::ScalarType dtype() const { return dtype_; }
  // The largest number of layers gathered at the same time since the last call.
  int take_peak_gathered() {
    int peak = 0;
    for (const auto& domain : domains_) peak += domain->values->take_peak_gathered();
    return peak;
  }

 private:
  // Where a parameter is.
  struct Place {
    ReductionDomain* domain = nullptr;
    int index = 0;  // there
  };
  const Place& place_of(const Parameter& parameter) const;
  void new_values(bool frozen_too);
  void make_partial_sums();
  void sum_partial_gradients();

  const ParallelGroups& groups_;
  const at::ScalarType dtype_;
  bool shard_grads_ = false;  // gradients are reduce-scattered after every pass
  bool shard_values_ = false;
  bool overlap_grads_ = false;
  bool overlap_values_ = false;
  bool reduces_ = false;  // several ranks process different tokens
  const DataParallelGroups data_;
  std::vector<Parameter*> parameters_;                       // model order
  std::vector<std::pair<std::string, at::Tensor*>> states_;  // of the module
  std::vector<std::unique_ptr<ReductionDomain>> domains_;
  std::unordered_map<const Parameter*, Place> places_;
  int64_t values_version_ = 0;
  bool in_step_ = false;
  std::vector<FlatShard> shards_;
  std::vector<SharedGrad> shared_grads_;
  // Of the other groups over which gradients are partial: this rank's parts of all of those.
  std::vector<std::pair<const ProcessGroup*, std::vector<at::Tensor>>> partial_sums_;
  std::vector<std::function<void()>>* deferred_ = nullptr;
  std::vector<Parameter*>* recorded_ = nullptr;
};

}  // namespace megatron
