#include "megatron/training/planning/sharded_stores.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/distributed/buffer_layout.h"
#include "megatron/distributed/gather_order.h"
#include "megatron/distributed/sharded_layout.h"

namespace megatron {

// Bytes held now by all stores of a rank, and the most since reset().
class ShardedStores::Held {
 public:
  void add_weights(int64_t bytes) { add(bytes, 0); }
  void add_gradients(int64_t bytes) { add(0, bytes); }
  void reset() { most_ = now_; }
  const PassingBytes& most() const { return most_; }

 private:
  void add(int64_t weights, int64_t gradients) {
    now_.weights += weights;
    now_.gradients += gradients;
    if (now_.total() > most_.total()) most_ = now_;
  }
  PassingBytes now_, most_;
};

// A parameter of a moment: its domain, and its place there.
struct ShardedStores::Use {
  Domain* domain;
  int parameter;
  bool read_again;  // in the backward
  bool deferred;    // its gradient waits for the pass W
};

// The parameters of one chunk whose gradients are summed over the same ranks.
class ShardedStores::Domain {
 public:
  Domain(const LayoutPlan& plan, const PlannedBuffer& buffer, Held& held)
      : slots_(buffer.layout.slots),
        sharding_(buffer.sharding),
        ddp_(plan.arguments.ddp),
        bytes_(plan.bytes),
        held_(held),
        sequence_(reduction_order(buffer.layout, buffer.parameters)) {
    const std::vector<int> units = gathered_together(buffer.layout);
    for (const BufferBucket& bucket : buffer.layout.buckets)
      buckets_.push_back({bucket.end - bucket.begin, bucket.value_elements * plan.bytes.model,
                          units[buckets_.size()], bucket.frozen, bucket.table});
  }

  void begin_step(int64_t passes) {
    gather_only(-1, -1);
    while (const std::optional<int> next = sequence_.next_left())
      reduce(buckets_[static_cast<size_t>(*next)], sequence_.in_last_round());
    finish_all_but(0);
    sequence_.restart(passes, 1);
  }

  // The value is used: its unit is gathered, and the one that is expected next.
  void use(int parameter) {
    const int unit = bucket_of(parameter).unit;
    if (!sharding_.values || unit == order_.current()) return;
    order_.enter(unit);
    gather_only(unit, ddp_.overlap_param_gather ? order_.predicted().value_or(unit) : unit);
  }

  // The gradient is written.
  void report(int parameter) {
    Bucket& bucket = bucket_of(parameter);
    if (!sharding_.gradients || bucket.frozen) return;
    if (!std::exchange(bucket.fills, true)) {
      finish_all_but(1);
      held_.add_gradients(bucket.elements * bytes_.sum);
    }
    const bool too_often = sequence_.report(parameter);
    MEGATRON_ASSERT(!too_often, "a plan uses parameter ", parameter, " of a domain too often");
    while (const std::optional<int> next = sequence_.next_ready())
      reduce(buckets_[static_cast<size_t>(*next)], sequence_.in_last_round());
  }

 private:
  struct Bucket {
    int64_t elements, value_bytes;
    int unit;
    bool frozen, table;
    bool gathered = false, fills = false;
  };

  Bucket& bucket_of(int parameter) {
    return buckets_[static_cast<size_t>(slots_[static_cast<size_t>(parameter)].bucket)];
  }

  // Frees the other units before it gathers these.
  void gather_only(int unit, int next) {
    for (const bool wanted : {false, true}) {
      for (Bucket& bucket : buckets_) {
        const bool now = bucket.unit == unit || bucket.unit == next;
        if (now != wanted || std::exchange(bucket.gathered, now) == now) continue;
        held_.add_weights(now ? bucket.value_bytes : -bucket.value_bytes);
      }
    }
  }

  void reduce(Bucket& bucket, bool last) {
    if ((bucket.table && !last) || !std::exchange(bucket.fills, false)) return;
    const int64_t whole = bucket.elements * bytes_.sum;
    if (ddp_.grad_reduce_in_bf16) held_.add_gradients(2 * bucket.elements);  // a rounded copy
    if (ddp_.grad_reduce_in_bf16) held_.add_gradients(-whole);
    in_flight_.push_back(ddp_.grad_reduce_in_bf16 ? 2 * bucket.elements : whole);
    if (!ddp_.overlap_grad_reduce) finish_all_but(0);
  }

  void finish_all_but(size_t count) {
    for (; in_flight_.size() > count; in_flight_.pop_front())
      held_.add_gradients(-in_flight_.front());
  }

  const std::vector<BufferSlot>& slots_;
  const DataSharding& sharding_;
  const DistributedDataParallelConfig& ddp_;
  const ElementBytes& bytes_;
  Held& held_;
  std::vector<Bucket> buckets_;
  GatherOrder order_;
  BucketSequence sequence_;
  std::deque<int64_t> in_flight_;  // bytes of the buckets being reduced
};

ShardedStores::ShardedStores(const LayoutPlan& plan, int stage,
                             const std::vector<PassBytes>& passes)
    : num_microbatches_(plan.num_microbatches), held_(std::make_unique<Held>()) {
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    std::map<const Parameter*, std::pair<Domain*, int>> places;
    domains_.emplace_back();
    for (const PlannedBuffer& buffer : plan.buffers(stage, chunk)) {
      domains_.back().push_back(std::make_unique<Domain>(plan, buffer, *held_));
      for (size_t i = 0; i < buffer.parameters.size(); ++i)
        places[buffer.parameters[i]] = {domains_.back().back().get(), static_cast<int>(i)};
    }
    const StageSlice slice = plan.stages.slice(stage, chunk);
    const size_t after = passes[static_cast<size_t>(chunk)].moments.size() - 2;
    const size_t head = after + (plan.splits_vocabulary() ? 2 : 1);
    std::vector<std::vector<Use>>& uses = uses_.emplace_back(after + 3);
    size_t layers = 0;
    std::string last;
    std::vector<Use> again;
    const std::vector<Parameter*> parameters =
        plan.held_by(stage).chunks[static_cast<size_t>(chunk)]->parameters();
    // Those of multi-token prediction run with the head, those of an encoder before the layers.
    const auto of_encoder = [&plan](const Parameter* p) {
      return std::ranges::any_of(plan.ends.modules, [&](const ModuleCost& module) {
        return p->name.starts_with(module.name);
      });
    };
    const auto in_layers = [&](const Parameter* p) {
      return part_of_model(p->name).is_layer() && !p->name.starts_with("mtp.") && !of_encoder(p);
    };
    auto left = std::ranges::count_if(parameters, in_layers);
    for (const Parameter* p : parameters) {
      const ModelPart part = part_of_model(p->name);
      const bool in_layer = in_layers(p);
      if (in_layer) --left;
      const bool output = p->role == ParameterRole::kOutput ||
                          (p->role == ParameterRole::kEmbedding && !slice.embedding);
      if (in_layer && part.name != std::exchange(last, part.name))
        layers = std::min(layers + 1, after - 1);
      // What stands between layers, as the norm behind an encoder, runs with the layer before it.
      const size_t moment = of_encoder(p)                    ? 0
                            : in_layer                       ? layers
                            : output                         ? head
                            : layers == 0 && slice.embedding ? 0
                            : layers > 0 && left > 0         ? layers
                                                             : after;
      const auto& [domain, index] = places.at(p);
      const bool read_again = (moment > 0 || of_encoder(p)) && p->role != ParameterRole::kBias &&
                              (moment > 0 || p->role != ParameterRole::kEmbedding);
      uses[moment].push_back({domain, index, read_again, output || is_hidden_matrix(*p)});
      if (moment == 0 && slice.head && p->uses > 1) again.push_back({domain, index, true, true});
    }
    uses[head].insert(uses[head].end(), again.begin(), again.end());
  }
}

ShardedStores::~ShardedStores() = default;

void ShardedStores::begin_step() {
  for (const auto& domains : domains_)
    for (const auto& domain : domains) domain->begin_step(num_microbatches_);
}

void ShardedStores::evaluate() {
  for (int pass = 0; pass < 2; ++pass)
    for (size_t chunk = 0; chunk < uses_.size(); ++chunk)
      for (size_t moment = 0; moment < uses_[chunk].size(); ++moment)
        forward(static_cast<int>(chunk), moment);
}

PassingBytes ShardedStores::forward(int chunk, size_t moment) {
  held_->reset();
  for (const Use& use : uses_at(chunk, moment)) use.domain->use(use.parameter);
  return held_->most();
}

PassingBytes ShardedStores::backward(int chunk, size_t moment, GradientPass pass) {
  held_->reset();
  const std::vector<Use>& uses = uses_at(chunk, moment);
  for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
    if (use->read_again && pass != GradientPass::kWeight) use->domain->use(use->parameter);
    if (pass == GradientPass::kWhole || use->deferred == (pass == GradientPass::kWeight))
      use->domain->report(use->parameter);
  }
  return held_->most();
}

}  // namespace megatron
