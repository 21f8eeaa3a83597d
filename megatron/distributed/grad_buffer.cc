#include "megatron/distributed/grad_buffer.h"

#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

class WholeGrads final : public GradBuffer {
 public:
  WholeGrads(const ShardedLayout& layout, at::TensorOptions options, const GradReduction& reduction)
      : layout_(layout),
        reduction_(reduction),
        grads_(at::zeros({layout.buffer.num_trained_elements}, options)) {
    for (size_t i = 0; i < layout.parameters.size(); ++i)
      views_.push_back(layout.parameters[i]->trainable
                           ? layout.view_in_buffer(grads_, static_cast<int>(i))
                           : at::Tensor());
    stale_.assign(views_.size(), false);
  }

  GradTarget target(int parameter) override {
    const double beta = stale_[parameter] ? 0.0 : 1.0;
    stale_[parameter] = false;
    return {views_[parameter], beta};
  }
  at::Tensor view(int parameter) override {
    clear(parameter);
    return views_[parameter];
  }
  const at::Tensor& flat() const override { return grads_; }
  int64_t own_begin(int bucket) const override {
    return layout_.bucket_begin(bucket) + layout_.shard_begin(bucket);
  }

  // Nothing is written: the first gradient of each parameter replaces what is there. What lies
  // between parameters stays zero.
  void zero() override {
    stale_.assign(views_.size(), true);
    pending_.clear();
  }

  void reduce(int bucket) override {
    for (const int parameter : layout_.buffer.buckets[bucket].parameters) clear(parameter);
    const DataParallelGroups& groups = layout_.groups;
    if (groups.shard.size() == 1 && groups.replica.size() == 1) return;
    // The sum between instances of a bucket starts when the next bucket does, so that nothing waits
    // for the first sum.
    if (!pending_.empty()) sum_instances(pending_.back());
    at::Tensor whole =
        grads_.narrow(0, layout_.bucket_begin(bucket), layout_.bucket_elements(bucket));
    if (reduction_.in_bf16) whole = whole.to(at::kBFloat16);
    const at::Tensor own =
        whole.narrow(0, layout_.shard_begin(bucket), layout_.shard_elements(bucket));
    pending_.push_back({bucket, own, nullptr, false});
    if (groups.shard.size() > 1) {
      pending_.back().work = groups.shard.reduce_scatter(own, whole);
    } else {
      sum_instances(pending_.back());
    }
  }

  void finish() override {
    for (Pending& pending : pending_) {
      sum_instances(pending);
      pending.work->wait();
      if (reduction_.in_bf16)
        grads_.narrow(0, own_begin(pending.bucket), pending.own.numel()).copy_(pending.own);
    }
    pending_.clear();
  }

 private:
  struct Pending {
    int bucket;
    at::Tensor own;
    std::shared_ptr<Work> work;
    bool between_instances;  // work is the second of the two sums
  };

  // A parameter that got no gradient has a zero one.
  void clear(int parameter) {
    if (stale_[parameter]) views_[parameter].zero_();
    stale_[parameter] = false;
  }

  void sum_instances(Pending& pending) {
    if (pending.between_instances || layout_.groups.replica.size() == 1) return;
    if (pending.work) pending.work->wait();
    pending.work = layout_.groups.replica.all_reduce(pending.own);
    pending.between_instances = true;
  }

  const ShardedLayout& layout_;
  const GradReduction reduction_;
  at::Tensor grads_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<bool> stale_;        // by parameter: holds a gradient of the last step
  std::vector<Pending> pending_;   // in the order of their start
};

class ShardedGrads final : public GradBuffer {
 public:
  ShardedGrads(const ShardedLayout& layout, at::TensorOptions options,
               const GradReduction& reduction)
      : layout_(layout),
        reduction_(reduction),
        shard_(at::zeros({layout.packed_trained_elements()}, options)),
        filling_(layout.buffer.buckets.size()) {}

  GradTarget target(int parameter) override { return {view(parameter), 1.0}; }
  at::Tensor view(int parameter) override {
    const int bucket = layout_.buffer.slots[parameter].bucket;
    return layout_.view_in_bucket(whole(bucket), parameter);
  }
  const at::Tensor& flat() const override { return shard_; }
  int64_t own_begin(int bucket) const override { return layout_.packed_begin(bucket); }

  void zero() override {
    shard_.zero_();
    filling_.assign(filling_.size(), at::Tensor());
    pending_ = {};
  }

  void reduce(int bucket) override {
    add_pending();
    at::Tensor input = whole(bucket);  // zeros where this rank used nothing of it
    filling_[bucket].reset();
    if (reduction_.in_bf16) input = input.to(at::kBFloat16);
    const at::Tensor own = at::empty({layout_.shard_elements(bucket)}, input.options());
    pending_ = {bucket, own, input, layout_.groups.shard.reduce_scatter(own, input)};
    if (!reduction_.overlap) add_pending();
  }

  void finish() override {
    add_pending();
    if (layout_.groups.replica.size() == 1) return;
    if (!reduction_.in_bf16) return layout_.groups.replica.all_reduce(shard_)->wait();
    const at::Tensor rounded = shard_.to(at::kBFloat16);
    layout_.groups.replica.all_reduce(rounded)->wait();
    shard_.copy_(rounded);
  }

 private:
  struct Pending {
    int bucket = -1;
    at::Tensor own, input;
    std::shared_ptr<Work> work;
  };

  at::Tensor& whole(int bucket) {
    at::Tensor& filling = filling_[bucket];
    if (!filling.defined())
      filling = at::zeros({layout_.bucket_elements(bucket)}, shard_.options());
    return filling;
  }

  void add_pending() {
    if (!pending_.work) return;
    pending_.work->wait();
    shard_.narrow(0, own_begin(pending_.bucket), pending_.own.numel()).add_(pending_.own);
    pending_ = {};
  }

  const ShardedLayout& layout_;
  const GradReduction reduction_;
  at::Tensor shard_;
  std::vector<at::Tensor> filling_;  // by bucket; undefined: takes no gradient now
  Pending pending_;
};

}  // namespace

std::unique_ptr<GradBuffer> make_whole_grads(const ShardedLayout& layout, at::TensorOptions options,
                                             const GradReduction& reduction) {
  return std::make_unique<WholeGrads>(layout, options, reduction);
}

std::unique_ptr<GradBuffer> make_sharded_grads(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const GradReduction& reduction) {
  return std::make_unique<ShardedGrads>(layout, options, reduction);
}

}  // namespace megatron
