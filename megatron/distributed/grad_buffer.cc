#include "megatron/distributed/grad_buffer.h"

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "megatron/distributed/shard_reduce.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Peer copies only pay if they overlap with a backward.
ShardReduce make_shard_reduce(const ShardedLayout& layout, const at::TensorOptions& options,
                              const GradReduction& reduction) {
  int64_t largest = 0;
  for (int bucket = 0; bucket < layout.buffer.num_trained_buckets; ++bucket)
    largest = std::max(largest, layout.shard_elements(bucket));
  return {layout.groups.shard, largest, reduction.in_bf16 ? options.dtype(at::kBFloat16) : options,
          reduction.peer_copies && reduction.overlap};
}

class WholeGrads final : public GradBuffer {
 public:
  WholeGrads(const ShardedLayout& layout, at::TensorOptions options, const GradReduction& reduction)
      : layout_(layout),
        reduction_(reduction),
        grads_(at::zeros({layout.buffer.num_trained_elements}, options)),
        parts_(make_shard_reduce(layout, options, reduction)) {
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

  // Zeroes lazily: the first gradient of each parameter overwrites the old one. The gaps between
  // parameters stay zero.
  void zero() override {
    stale_.assign(views_.size(), true);
    pending_.clear();
  }

  void reduce(int bucket, bool) override {
    for (const int parameter : layout_.buffer.buckets[bucket].parameters) clear(parameter);
    const DataGrid& groups = layout_.groups;
    if (groups.shard.size() == 1 && groups.replica.size() == 1) return;
    // The sum of a bucket between instances starts together with the next bucket, so that the host
    // never waits for the first sum.
    if (!pending_.empty()) sum_instances(pending_.back());
    at::Tensor whole =
        grads_.narrow(0, layout_.bucket_begin(bucket), layout_.bucket_elements(bucket));
    if (reduction_.in_bf16) whole = whole.to(at::kBFloat16);
    const at::Tensor own =
        whole.narrow(0, layout_.shard_begin(bucket), layout_.shard_elements(bucket));
    pending_.push_back({bucket, own, nullptr, false});
    if (groups.shard.size() == 1)
      sum_instances(pending_.back());
    else
      pending_.back().work = parts_.start(whole, own, /*accumulate=*/false);
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
    bool between_instances;  // work is the sum between instances
  };

  // A parameter without a gradient in this step gets zeros.
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
  ShardReduce parts_;
  std::vector<at::Tensor> views_;  // by parameter
  std::vector<bool> stale_;        // by parameter: still holds the last step's gradient
  std::vector<Pending> pending_;   // in order of start
};

class ShardedGrads final : public GradBuffer {
 public:
  ShardedGrads(const ShardedLayout& layout, at::TensorOptions options,
               const GradReduction& reduction)
      : layout_(layout),
        reduction_(reduction),
        shard_(at::zeros({layout.packed_trained_elements()}, options)),
        parts_(make_shard_reduce(layout, options, reduction)),
        filling_(layout.buffer.buckets.size()),
        written_(layout.parameters.size(), false),
        summed_(layout.buffer.buckets.size(), false) {
    for (int bucket = 0; bucket < layout.buffer.num_trained_buckets; ++bucket)
      gaps_.push_back(gaps_of(bucket));
  }

  GradTarget target(int parameter) override {
    const double beta = written_[parameter] ? 1.0 : 0.0;
    written_[parameter] = true;
    return {place(parameter), beta};
  }
  at::Tensor view(int parameter) override {
    clear(parameter);
    return place(parameter);
  }
  const at::Tensor& flat() const override { return shard_; }
  int64_t own_begin(int bucket) const override { return layout_.packed_begin(bucket); }

  // Zeroes lazily: the first sum of each bucket overwrites the old one. The gaps between parameters
  // stay zero.
  void zero() override {
    finish_all_but(0);
    filling_.assign(filling_.size(), at::Tensor());
    written_.assign(written_.size(), false);
    summed_.assign(summed_.size(), false);
  }

  void reduce(int bucket, bool last) override {
    if (!last && layout_.buffer.buckets[bucket].table) return;
    for (const int parameter : layout_.buffer.buckets[bucket].parameters) {
      clear(parameter);
      written_[parameter] = false;
    }
    at::Tensor input = std::exchange(filling_[bucket], at::Tensor());
    if (reduction_.in_bf16) input = input.to(at::kBFloat16);
    sums_.push_back(
        parts_.start(input, shard_.narrow(0, own_begin(bucket), layout_.shard_elements(bucket)),
                     summed_[bucket]));
    summed_[bucket] = true;
    if (!reduction_.overlap) finish_all_but(0);
  }

  void finish() override {
    finish_all_but(0);
    if (layout_.groups.replica.size() == 1) return;
    if (!reduction_.in_bf16) return layout_.groups.replica.all_reduce(shard_)->wait();
    const at::Tensor rounded = shard_.to(at::kBFloat16);
    layout_.groups.replica.all_reduce(rounded)->wait();
    shard_.copy_(rounded);
  }

 private:
  // Elements of a bucket that belong to no parameter.
  struct Gap {
    int64_t begin, count;  // elements, relative to the start of the bucket
  };
  std::vector<Gap> gaps_of(int bucket) const {
    const BufferBucket& range = layout_.buffer.buckets[bucket];
    std::vector<BufferSlot> slots;
    for (const int parameter : range.parameters) slots.push_back(layout_.buffer.slots[parameter]);
    std::sort(slots.begin(), slots.end(),
              [](const BufferSlot& a, const BufferSlot& b) { return a.begin < b.begin; });
    const int64_t first = layout_.bucket_begin(bucket);
    std::vector<Gap> gaps;
    int64_t end = first;
    const auto close = [&](int64_t begin) {
      if (begin > end) gaps.push_back({end - first, begin - end});
    };
    for (const BufferSlot& slot : slots) {
      close(slot.begin);
      end = slot.end;
    }
    close(range.end);
    return gaps;
  }

  void finish_all_but(size_t count) {
    for (; sums_.size() > count; sums_.pop_front()) sums_.front()->wait();
  }

  // The bucket that gradients are written to; only the gaps between parameters are zeroed. While it
  // fills, the latest reduction may still be in flight: the backward only waits for older ones.
  at::Tensor& whole(int bucket) {
    at::Tensor& filling = filling_[bucket];
    if (filling.defined()) return filling;
    finish_all_but(1);
    filling = at::empty({layout_.bucket_elements(bucket)}, shard_.options());
    for (const Gap& gap : gaps_[bucket]) filling.narrow(0, gap.begin, gap.count).zero_();
    return filling;
  }

  at::Tensor place(int parameter) {
    return layout_.view_in_bucket(whole(layout_.buffer.slots[parameter].bucket), parameter);
  }

  // A parameter without a gradient in this pass gets zeros.
  void clear(int parameter) {
    if (!written_[parameter]) place(parameter).zero_();
    written_[parameter] = true;
  }

  const ShardedLayout& layout_;
  const GradReduction reduction_;
  at::Tensor shard_;
  ShardReduce parts_;
  std::vector<std::vector<Gap>> gaps_;      // by trained bucket
  std::vector<at::Tensor> filling_;         // by bucket; undefined: not being filled
  std::vector<bool> written_;               // by parameter: its gradient is in the bucket
  std::vector<bool> summed_;                // by bucket: the shard holds a sum of this step
  std::deque<std::shared_ptr<Work>> sums_;  // in flight, in order of start
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
