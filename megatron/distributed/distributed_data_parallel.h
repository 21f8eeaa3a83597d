// Owner of a model chunk's weights and gradients: keeps them whole or in shards, and sums gradients
// over the ranks that hold different tokens.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "megatron/distributed/bucket_sequence.h"
#include "megatron/distributed/delayed_scaling.h"
#include "megatron/distributed/grad_buffer.h"
#include "megatron/distributed/value_buffer.h"
#include "megatron/nn/module.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// A run of elements of one parameter that this rank updates.
struct FlatSlot {
  Parameter* parameter = nullptr;
  int index = 0;           // of the parameter, in model order
  int64_t begin = 0;       // in the tensors of the shard
  int64_t flat_begin = 0;  // in the flattened local parameter
  int64_t flat_end = 0;
  int64_t num_elements() const { return flat_end - flat_begin; }
};

// What this rank holds, in pieces that are contiguous both among values and among gradients:
// everything in one piece, or its slice of every bucket. Either all of a piece is trained or all of
// it is frozen. Elements of both tensors that belong together have one offset.
struct FlatShard {
  at::Tensor values;  // [n] in the model's type, a view
  at::Tensor grads;   // [n] fp32 (fp64), a view; sums over the data ranks after finish_grad_sync().
                      // Undefined: frozen
  std::vector<FlatSlot> slots;
  bool trained() const { return grads.defined(); }
};

// A stored tensor: what this rank holds of it, and where that lies. `description.data` is not set;
// write to `data` to load.
struct StateTensor {
  ShardedTensor description;
  at::Tensor data;  // [description.flat_end - description.flat_begin], a view
  // The data ranks that hold the same and divide reading and writing; null: too little to divide.
  // Theirs is the first copy when `copy` is 0: tensor ranks hold whole tensors alike, stages those
  // that they share.
  const ProcessGroup* replicas = nullptr;
  int copy = 0;
  at::Device device = at::kCPU;  // of the collectives of `replicas`; `data` may lie on the host
};

// Gradients are summed, never averaged: losses are (sum, weight) pairs and the optimizer divides
// once by the weight of the whole step.
//
// A step: zero_grad(passes); that many backward passes; finish_grad_sync(); Optimizer::step(),
// which calls values_changed(). Buckets are reduced in one fixed order, as they fill or at the end,
// so that every rank issues the same collectives whatever it used.
//
// Frozen parameters (Parameter::trainable, read by the constructor) have values and nothing else.
//
// What the ranks of a shard group (s of them) divide, and bytes per parameter with bf16 values and
// fp32 Adam states:
//   no_shard            nothing                              18
//   optim               master weights, moments              6 + 12/s
//   optim_grads         and main gradients                   2 + 16/s, and buckets that are filled
//                       (4)
//   optim_grads_params  and values                           18/s, and one or two gathered layers
//                                                            (2), buckets as above
//
// Communication per step, for a group of s and P parameters; r ranks hold each shard:
//   no_shard            all-reduce of the gradients over dp_cp
//   optim               reduce-scatter of the gradients, all-gather of the values
//   optim_grads         reduce-scatter of the gradients per pass (embeddings: once), all-gather of
//                       the values
//   optim_grads_params  as optim_grads; values are gathered in each forward and in each backward
//   r > 1               all-reduce of the shard of the gradients over its r ranks, once
//   Parameters with partial gradients: one all-reduce over tp of this rank's parts of all of them.
//   Parameters that several stages share: one all-reduce each over those stages. Sums commute;
//   after the sum over the data ranks they are s times smaller, and no bucket waits for another
//   group.
// Source: Rajbhandari et al. 2020 (arXiv:1910.02054); Zhao et al. 2023 (arXiv:2304.11277) for
// instances and prefetching.
//
// Not thread safe. Keeps references to module and groups, which must outlive it.
class DistributedDataParallel final : public ParameterStore {
 public:
  // Allocates values (zeros) and gradients of every parameter of `module`, names the parameters
  // that have no name yet, and attaches itself as their store. With optim_grads_params a bucket is
  // a layer, and so is each part around the layers. `data` is made from the groups when it is not
  // given. Throws Error for expert parameters, which are not built yet.
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

  // Whether the passes of a step run beside collectives of this store, which they start or wait for
  // bucket by bucket.
  bool gathers_under_first_pass() const { return overlap_values_; }
  bool reduces_under_last_pass() const { return overlap_grads_ && reduces_; }

  // Runs `pass`, whose work is recorded for later, and returns the parameters whose gradients it
  // reported, in that order. Whoever runs that work reports them: grad_target() and grad_ready() of
  // each. Not with sharded gradients.
  std::vector<Parameter*> record_gradients(const std::function<void()>& pass);

  int64_t values_version() const override { return shard_values_ ? -1 : values_version_; }
  // What layers keep that was made from the values, as the codes of quantised weights, is made
  // again.
  void forget_what_is_kept() { ++values_version_; }
  const DelayedScales* delayed_scales(const Parameter& weight) override;

  // While a queue is set, weight gradients are put there instead of being computed; null: computed
  // at once.
  void defer_weight_gradients_to(std::vector<std::function<void()>>* queue) { deferred_ = queue; }

  // A step begins: gradients become zero, and `passes` backward passes follow.
  void zero_grad(int64_t passes = 1);
  // Waits until this rank's gradients are sums over all ranks. Once per step, after the last
  // backward. Collective.
  void finish_grad_sync();

  // This rank's shards are about to be written: waits until no peer reads them (Note [Peer copies]
  // in shard_gather.h). Comes before every values_changed(); finish_grad_sync() includes it.
  // Collective.
  void values_will_change() { values_->will_change(); }
  // The values of this rank's shards have changed: the others get them, meanwhile with
  // overlap_param_gather. Collective.
  void values_changed() { new_values(/*frozen_too=*/true); }
  // The same where frozen values are what they were.
  void trained_values_changed() { new_values(/*frozen_too=*/false); }
  // Waits for them. acquire() does so for what it gives; needed before Parameter::value is read
  // directly.
  void finish_param_sync() { values_->finish(); }
  // Calls the visitor with every parameter, its value being whole; what it writes becomes the
  // value. Collective; every rank must write the same.
  void edit_values(const std::function<void(Parameter&)>& visitor);
  // edit_values() with initialize_parameter().
  void initialize(int64_t seed);

  // The end of a step for delayed scales: largest values are joined over the tensor, data and
  // context ranks, and scales follow from them. Collective; nothing without delayed scaling.
  void update_delayed_scales();
  // The delayed scales as checkpoints store them, "fp8.<linear>" with entries for input, weight and
  // output gradient: the scale, then the history. delayed_scales_loaded() has to follow a load.
  std::vector<StateTensor> delayed_scaling_state() const;
  void delayed_scales_loaded();

  // What this rank holds; the optimizer updates the first ones, which are trained.
  const std::vector<FlatShard>& shards() const { return shards_; }
  // The model's weights as checkpoints store them: one entry for each parameter, of which this rank
  // may hold nothing. values_changed() has to follow a load.
  std::vector<StateTensor> state() const;
  // The same for other tensors of one type that are laid out as the values: keys are prefix + name,
  // and `part` gives the elements of a slot of a shard, which has an index.
  std::vector<StateTensor> describe(
      const std::string& prefix, at::ScalarType type, bool trainable_only,
      const std::function<at::Tensor(size_t shard, const FlatSlot&)>& part) const;

  // The gradient of a parameter, shaped like its value: a view. Not with sharded gradients.
  at::Tensor grad(const Parameter& parameter) const;
  bool shards_values() const { return shard_values_; }  // this rank holds its own parts alone
  const at::Tensor& flat_values() const { return values_->flat(); }
  const at::Tensor& flat_grads() const { return grads_->flat(); }
  const BufferLayout& layout() const { return layout_.buffer; }
  const std::vector<Parameter*>& parameters() const { return layout_.parameters; }  // model order
  const ParallelGroups& groups() const { return groups_; }
  const DataParallelGroups& data_groups() const { return layout_.groups; }
  at::ScalarType dtype() const { return dtype_; }
  // The largest number of layers that were gathered at one time since the last call.
  int take_peak_gathered() { return values_->take_peak_gathered(); }

 private:
  int index_of(const Parameter& parameter) const;
  void plan(const DistributedDataParallelConfig& config);
  BucketSequence make_sequence() const;
  void make_shards();
  void new_values(bool frozen_too);
  void sum_partial_gradients();
  void sum_shared_gradients();

  const ParallelGroups& groups_;
  const at::ScalarType dtype_;
  bool shard_grads_ = false;  // gradients are reduced after every pass
  bool shard_values_ = false;
  bool overlap_grads_ = false;
  bool overlap_values_ = false;
  bool reduces_ = false;  // several ranks hold different tokens
  ShardedLayout layout_;
  std::unordered_map<const Parameter*, int> index_;
  std::unique_ptr<ValueBuffer> values_;
  std::unique_ptr<GradBuffer> grads_;
  std::unique_ptr<BucketSequence> sequence_;
  std::unique_ptr<DelayedScaling> scaling_;  // null: no weight has delayed scales
  int64_t values_version_ = 0;
  bool in_step_ = false;
  std::vector<FlatShard> shards_;
  std::vector<std::function<void()>>* deferred_ = nullptr;
  std::vector<Parameter*>* recorded_ = nullptr;
};

}  // namespace megatron
