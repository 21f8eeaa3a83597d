#include "megatron/training/proving/exact_update.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "megatron/distributed/buffer_layout.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/random.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// Who contributes to the gradient of a parameter, and how often in a step. Uses are those of all
// stages that share it, one stage after the other.
struct Contributors {
  int64_t data, partial, microbatches, uses;
  int64_t count() const { return data * partial * microbatches * uses; }
  int64_t index(int64_t d, int64_t part, int64_t microbatch, int64_t use) const {
    return ((d * partial + part) * microbatches + microbatch) * uses + use;
  }
};

// The uses of a shared parameter in a pass. Stages may differ: one embeds the tokens, another has
// the head and depths of multi-token prediction.
struct StageUses {
  int64_t before = 0;  // on the stages before this one
  int64_t all = 0;
};

// By name. Collective.
std::map<std::string, StageUses> uses_of_stages(const TrainedModel& model) {
  std::map<std::string, const Parameter*> shared;  // the same order on all stages
  for (const ModelChunk& chunk : model.chunks)
    for (const Parameter* parameter : chunk.store->parameters())
      if (parameter->shared != nullptr) shared.emplace(parameter->name, parameter);
  const auto options = at::TensorOptions().dtype(at::kLong).device(model.device());
  std::map<std::string, StageUses> out;
  for (const auto& [name, parameter] : shared) {
    const ProcessGroup& stages = *parameter->shared;
    const at::Tensor uses = at::zeros({stages.size()}, options);
    stages.all_gather(uses, at::full({1}, parameter->uses, options))->wait();
    out[name] = {uses.narrow(0, 0, stages.rank()).sum().item<int64_t>(),
                 uses.sum().item<int64_t>()};
  }
  return out;
}

// A number in [0, count), by the upper half of the random one.
int64_t below(int64_t count, uint64_t random) {
  return static_cast<int64_t>((random >> 32) * static_cast<uint64_t>(count) >> 32);
}

// Integers of `total_bits` bits and a sign, every eighth zero, and how they are divided: one
// contributor has the whole, and up to 32 pairs of contributors add what cancels. Sums of any of
// the contributions stay below 2^total_bits + 32 * noise.
struct Integers {
  int total_bits;
  int64_t noise;
  int64_t total(uint64_t random) const {
    if (random % 8 == 0) return 0;
    const int64_t bound = int64_t{1} << total_bits;
    return static_cast<int64_t>(random >> 3 & static_cast<uint64_t>(2 * bound - 1)) - bound;
  }
  // Of contributor `index` of `count`.
  int64_t part(uint64_t random, int64_t index, int64_t count) const {
    int64_t place = index + below(count, random);
    if (place >= count) place -= count;
    int64_t value = place == 0 ? total(random) : 0;
    constexpr int64_t kMost = 64;
    if (place >= std::min(count, kMost) / 2 * 2) return value;
    const uint64_t of_pair = (random + static_cast<uint64_t>(place / 2)) * 0x9e3779b97f4a7c15u;
    const int64_t draw = below(2 * noise + 1, of_pair) - noise;
    return place % 2 == 0 ? value + draw : value - draw;
  }
};
constexpr Integers kForBf16 = {7, 3};     // sums up to 2^8 are exact
constexpr Integers kForFp32 = {12, 999};  // up to 2^24; bf16 holds few of them

// An order of the parameters that does not depend on the layout: those that tensor ranks divide
// last, then by layer, `descending` or not.
int64_t order_of(const Parameter& parameter, bool descending) {
  constexpr int64_t kLayers = int64_t{1} << 20, kNames = int64_t{1} << 40;
  const int64_t layer = std::min(part_of_model(parameter.name).layer + 1, kLayers - 1);
  const int64_t place = descending ? kLayers - 1 - layer : layer;
  // Encoders of media are divided in some layouts and whole in others.
  const bool media =
      parameter.name.starts_with("vision_model.") || parameter.name.starts_with("audio_model.");
  const bool divided = !media && !parameter.placement.shards.empty();
  const uint64_t name = random_key(0, parameter.name).value % static_cast<uint64_t>(kNames);
  return (place + (divided ? kLayers : 0)) * kNames + static_cast<int64_t>(name);
}

// The order of the parameter that comes last of those whose names begin so, on all ranks.
// Collective.
int64_t last_of_all(const TrainedModel& model, bool descending, std::string_view name) {
  int64_t best = -1;
  for (const ModelChunk& chunk : model.chunks)
    for (const Parameter* parameter : chunk.store->parameters())
      if (parameter->trainable && parameter->name.starts_with(name))
        best = std::max(best, order_of(*parameter, descending));
  const at::Tensor most =
      at::full({1}, best, at::TensorOptions().dtype(at::kLong).device(model.device()));
  model.groups().world.all_reduce(most, ReduceOp::kMax)->wait();
  return most.item<int64_t>();
}

// The contributions of this rank to the gradients of a step.
class Drawn {
 public:
  Drawn(const TrainedModel& model, const Arguments& arguments, const StepOptions& options, int step,
        std::string_view infinite)
      : groups_(model.groups()),
        integers_(arguments.ddp.grad_reduce_in_bf16 ? kForBf16 : kForFp32),
        microbatches_(options.num_microbatches),
        step_(step),
        uses_of_stages_(uses_of_stages(model)) {
    const OptimizerConfig& o = arguments.optimizer;
    const bool skips = o.dynamic_loss_scale() || o.check_for_nan_in_loss_and_grad;
    if (!skips || (step != 2 && step != 4)) return;
    first_layer_ = step == 2;
    infinite_ = last_of_all(model, first_layer_, infinite);
  }

  // One contribution, [local shape] fp32 on the host.
  at::Tensor part(const Parameter& parameter, int64_t microbatch, int64_t use) const {
    const ProcessGroup& data = gradient_group(parameter.placement, groups_);
    const ProcessGroup& partial = groups_.group(parameter.placement.partial_grad);
    const auto shared = uses_of_stages_.find(parameter.name);
    const StageUses uses =
        shared == uses_of_stages_.end() ? StageUses{0, parameter.uses} : shared->second;
    const Contributors all{data.size(), partial.size(), microbatches_, uses.all};
    const int64_t own = all.index(data.rank(), partial.rank(), microbatch, uses.before + use);
    const at::Tensor values = at::zeros(parameter.local_shape, at::kFloat);
    auto* out = values.data_ptr<float>();
    const uint64_t key = random_key(step_, "gradient of " + parameter.name).value;
    for (const PlacedRun& run : placed_runs(parameter, groups_)) {
      for (int64_t i = 0; i < run.end - run.begin; ++i) {
        const uint64_t random = split_mix(key + static_cast<uint64_t>(run.first_place + i));
        out[run.begin + i] = static_cast<float>(integers_.part(random, own, all.count()));
      }
    }
    add_infinity(parameter, all, own, out);
    return values;
  }

 private:
  void add_infinity(const Parameter& parameter, const Contributors& all, int64_t own,
                    float* out) const {
    if (infinite_ < 0 || order_of(parameter, first_layer_) != infinite_) return;
    const int64_t by = first_layer_
                           ? all.index(all.data - 1, 0, 0, 0)
                           : all.index(0, all.partial - 1, all.microbatches - 1, all.uses - 1);
    if (own != by) return;
    const int64_t element = first_layer_ ? 0 : c10::multiply_integers(logical_shape(parameter)) - 1;
    for (const PlacedRun& run : placed_runs(parameter, groups_)) {
      const int64_t at = run.begin + element - run.first_place;
      if (run.begin <= at && at < run.end) out[at] = HUGE_VALF;
    }
  }

  const ParallelGroups& groups_;
  const Integers integers_;
  const int64_t microbatches_;
  const int step_;
  const std::map<std::string, StageUses> uses_of_stages_;
  int64_t infinite_ = -1;  // order_of() the parameter with an infinite gradient; -1: none
  bool first_layer_ = false;
};

}  // namespace

Arguments exact_update_arguments(Arguments arguments) {
  OptimizerConfig& o = arguments.optimizer;
  // Grows after the second step, falls at the latest after the fifth
  o.initial_loss_scale = 1024 * o.min_loss_scale;
  o.loss_scale_window = 2;
  o.hysteresis = std::min<int64_t>(o.hysteresis, 2);
  return arguments;
}

at::Tensor report_exact_gradients(TrainedModel& model, const Arguments& arguments,
                                  const StepOptions& options, int step, std::string_view infinite) {
  const at::NoGradGuard no_grad;
  for (ModelChunk& chunk : model.chunks)
    for (Parameter* parameter : chunk.store->parameters()) const AcquiredValue forward(parameter);
  const Drawn drawn(model, arguments, options, step, infinite);
  for (ModelChunk& chunk : model.chunks) chunk.store->zero_grad(options.num_microbatches);
  for (int64_t microbatch = 0; microbatch < options.num_microbatches; ++microbatch) {
    for (size_t k = model.chunks.size(); k-- > 0;) {
      DistributedDataParallel& store = *model.chunks[k].store;
      const std::vector<Parameter*>& parameters = store.parameters();
      for (size_t i = parameters.size(); i-- > 0;) {
        Parameter& parameter = *parameters[i];
        for (int64_t use = 0; parameter.trainable && use < parameter.uses; ++use) {
          const at::Tensor part = drawn.part(parameter, microbatch, use);
          const GradTarget target = store.grad_target(parameter);
          target.to_add_to().add_(part.to(target.tensor.device()));
          store.grad_ready(parameter);
        }
      }
    }
  }
  DistributedDataParallel::finish_grad_sync(model.stores());
  // So that some norms are clipped and others not
  const double weight = step % 3 == 0 ? 3 : 3 << 20;
  return at::tensor({0.0, weight}, at::TensorOptions().dtype(at::kDouble).device(model.device()));
}

}  // namespace megatron
