#include "megatron/distributed/value_buffer.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/distributed/gather_order.h"
#include "megatron/distributed/shard_gather.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

class WholeValues final : public ValueBuffer {
 public:
  WholeValues(const ShardedLayout& layout, at::TensorOptions options,
              const ValueGathering& gathering)
      : layout_(layout),
        overlap_(gathering.overlap),
        values_(at::zeros({layout.buffer.num_value_elements}, options)),
        gather_(layout.groups.shard, values_, gathering.peer_copies),
        gathers_(layout.buffer.buckets.size()) {
    for (size_t i = 0; i < layout.parameters.size(); ++i) {
      const int index = static_cast<int>(i);
      layout.parameters[i]->value =
          layout.value_in_bucket(whole(layout.buffer.slots[i].bucket), index);
    }
  }

  at::Tensor acquire(int parameter) override {
    if (gathering_) wait(layout_.buffer.slots[parameter].bucket);
    return layout_.parameters[parameter]->value;
  }
  void release(int) override {}
  const at::Tensor& flat() const override { return values_; }
  int64_t own_begin(int bucket) const override {
    return layout_.value_begin(bucket) +
           layout_.groups.shard.rank() * layout_.value_shard_elements(bucket);
  }

  const ShardGather& gather() const override { return gather_; }

  void will_change() override {
    finish();
    gather_.finish_reading();
  }

  void changed(bool frozen_too) override {
    if (layout_.groups.shard.size() == 1) return;
    finish();
    gather_.written();
    gathering_ = true;
    const int end = frozen_too ? layout_.num_buckets() : layout_.buffer.num_trained_buckets;
    for (int bucket = end; bucket-- > 0;) {  // the forward needs the last bucket first
      gathers_[bucket] = gather_.gather(
          whole(bucket), {layout_.value_begin(bucket), layout_.value_shard_elements(bucket)});
    }
    if (!overlap_) finish();
  }

  void finish() override {
    if (!gathering_) return;
    for (int bucket = layout_.num_buckets(); bucket-- > 0;) wait(bucket);
    gathering_ = false;
  }

  void edit(const std::function<void(Parameter&)>& visitor) override {
    will_change();
    for (Parameter* parameter : layout_.parameters) visitor(*parameter);
  }

 private:
  at::Tensor whole(int bucket) const {
    return values_.narrow(0, layout_.value_begin(bucket), layout_.value_elements(bucket));
  }

  void wait(int bucket) {
    if (!gathers_[bucket]) return;
    gathers_[bucket]->wait();
    gathers_[bucket].reset();
  }

  const ShardedLayout& layout_;
  const bool overlap_;
  at::Tensor values_;
  ShardGather gather_;
  std::vector<std::shared_ptr<Work>> gathers_;  // by bucket; null: not in flight
  bool gathering_ = false;
};

class ShardedValues final : public ValueBuffer {
 public:
  ShardedValues(const ShardedLayout& layout, at::TensorOptions options,
                const ValueGathering& gathering)
      : layout_(layout),
        overlap_(gathering.overlap),
        shard_(at::zeros({layout.packed_value_elements()}, options)),
        gather_(layout.groups.shard, shard_, gathering.peer_copies),
        nothing_(at::empty({0}, options)),
        gathered_(layout.buffer.buckets.size()),
        layer_of_(gathered_together(layout.buffer)) {
    for (size_t i = 0; i < layout.parameters.size(); ++i)
      layout.parameters[i]->value = nothing_of(static_cast<int>(i));
    layers_.resize(layout.buffer.buckets.size());
    for (int bucket = 0; bucket < layout.num_buckets(); ++bucket)
      layers_[layer_of_[bucket]].buckets.push_back(bucket);
  }

  at::Tensor acquire(int parameter) override {
    const int bucket = layout_.buffer.slots[parameter].bucket, layer = layer_of_[bucket];
    const bool entered = layer != order_.current();
    if (entered) order_.enter(layer);
    const std::optional<int> predicted = overlap_ && entered ? order_.predicted() : std::nullopt;
    if (entered) free_unused_but(layer, predicted.value_or(layer));
    gather_layer(layer);
    wait(bucket);
    if (predicted) gather_layer(*predicted);
    ++layers_[layer].users;
    return layout_.value_in_bucket(gathered_[bucket].whole, parameter);
  }

  void release(int parameter) override {
    Layer& layer = layers_[layer_of_[layout_.buffer.slots[parameter].bucket]];
    MEGATRON_ASSERT(layer.users > 0, layout_.parameters[parameter]->name,
                    " was released more often than acquired");
    --layer.users;
  }

  const ShardGather& gather() const override { return gather_; }

  void will_change() override {
    finish();
    gather_.finish_reading();
  }

  // Gathered values are out of date.
  void changed(bool) override {
    free_unused();
    MEGATRON_ASSERT(num_gathered_ == 0, num_gathered_,
                    " gathered layers are in use while their values change");
    gather_.written();
  }
  void finish() override {
    for (int bucket = 0; bucket < layout_.num_buckets(); ++bucket) wait(bucket);
  }
  void free_unused() override { free_unused_but(-1, -1); }

  void edit(const std::function<void(Parameter&)>& visitor) override {
    free_unused();
    MEGATRON_ASSERT(num_gathered_ == 0, num_gathered_,
                    " gathered layers are in use while their values are edited");
    for (int layer = static_cast<int>(layers_.size()); layer-- > 0;) {
      gather_layer(layer);
      for (const int bucket : layers_[layer].buckets) {
        wait(bucket);
        const at::Tensor& whole = gathered_[bucket].whole;
        const std::vector<int>& members = layout_.buffer.buckets[bucket].parameters;
        for (auto index = members.rbegin(); index != members.rend(); ++index) {
          Parameter& parameter = *layout_.parameters[*index];
          parameter.value = layout_.value_in_bucket(whole, *index);
          visitor(parameter);
          parameter.value = nothing_of(*index);
        }
      }
      will_change();
      for (const int bucket : layers_[layer].buckets) {
        const at::Tensor& whole = gathered_[bucket].whole;
        const int64_t count = layout_.value_shard_elements(bucket);
        own(bucket).copy_(whole.narrow(0, layout_.groups.shard.rank() * count, count));
      }
      free_unused();
    }
    gather_.written();
  }

  int take_peak_gathered() override { return std::exchange(peak_gathered_, num_gathered_); }
  const at::Tensor& flat() const override { return shard_; }
  int64_t own_begin(int bucket) const override { return layout_.packed_value_begin(bucket); }

 private:
  struct Gathered {
    at::Tensor whole;            // undefined: not gathered
    std::shared_ptr<Work> work;  // null: done
  };
  // Buckets that are gathered together.
  struct Layer {
    std::vector<int> buckets;
    bool gathered = false;
    int users = 0;
  };

  // [0], of the type of the parameter's value
  at::Tensor nothing_of(int parameter) const {
    return layout_.as_values(nothing_, layout_.buffer.slots[parameter].bucket);
  }

  at::Tensor own(int bucket) const {
    return shard_.narrow(0, own_begin(bucket), layout_.value_shard_elements(bucket));
  }

  void wait(int bucket) {
    std::shared_ptr<Work>& work = gathered_[bucket].work;
    if (work) work->wait();
    work.reset();
  }

  void gather_layer(int layer) {
    if (std::exchange(layers_[layer].gathered, true)) return;
    for (const int bucket : layers_[layer].buckets) {
      Gathered& gathered = gathered_[bucket];
      gathered.whole = at::empty({layout_.value_elements(bucket)}, shard_.options());
      gathered.work = gather_.gather(gathered.whole, {own_begin(bucket), 0});
    }
    peak_gathered_ = std::max(peak_gathered_, ++num_gathered_);
  }

  // On a GPU the caching allocator may give this memory to later work of the current stream, which
  // by then has waited for the gather.
  void free_unused_but(int keep, int keep_too) {
    for (int index = 0; index < static_cast<int>(layers_.size()); ++index) {
      Layer& layer = layers_[index];
      if (index == keep || index == keep_too || layer.users > 0 || !layer.gathered) continue;
      for (const int bucket : layer.buckets) {
        wait(bucket);
        gathered_[bucket] = {};
      }
      layer.gathered = false;
      --num_gathered_;
    }
  }

  const ShardedLayout& layout_;
  const bool overlap_;
  at::Tensor shard_;
  ShardGather gather_;
  at::Tensor nothing_;              // [0]; type and device of the model's values
  std::vector<Gathered> gathered_;  // by bucket
  std::vector<Layer> layers_;
  std::vector<int> layer_of_;  // by bucket
  GatherOrder order_;
  int num_gathered_ = 0;  // layers
  int peak_gathered_ = 0;
};

}  // namespace

std::unique_ptr<ValueBuffer> make_whole_values(const ShardedLayout& layout,
                                               at::TensorOptions options,
                                               const ValueGathering& gathering) {
  return std::make_unique<WholeValues>(layout, options, gathering);
}

std::unique_ptr<ValueBuffer> make_sharded_values(const ShardedLayout& layout,
                                                 at::TensorOptions options,
                                                 const ValueGathering& gathering) {
  return std::make_unique<ShardedValues>(layout, options, gathering);
}

}  // namespace megatron
