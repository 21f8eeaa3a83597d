#include "megatron/distributed/delayed_scaling.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t experts_of(const Parameter& weight) {
  return weight.placement.expert ? weight.local_shape.front() : 1;
}

// The groups whose ranks multiply rows with the weight, or with the same experts of it, whether
// they divide it or hold all of it.
std::vector<const ProcessGroup*> scale_groups(const Parameter& weight,
                                              const ParallelGroups& groups) {
  std::vector<const ProcessGroup*> all;
  const Axis tensor = weight.placement.expert ? Axis::kExpertTensor : Axis::kTensor;
  for (const ProcessGroup* group :
       {&gradient_group(weight.placement, groups), &groups.group({tensor})})
    if (group->size() > 1) all.push_back(group);
  return all;
}

}  // namespace

DelayedScaling::DelayedScaling(std::vector<const Parameter*> weights, const ParallelGroups& groups,
                               at::Device device)
    : weights_(std::move(weights)),
      experts_(weights_.front()->placement.expert),
      options_(*weights_.front()->delayed_scaling),
      ranks_(scale_groups(*weights_.front(), groups)) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  int64_t count = 0;
  for (const Parameter* weight : weights_) count += experts_of(*weight);
  state_ = at::zeros({count, 3, 1 + options_.history_length}, options);
  amax_ = at::zeros({count, 3}, options);
  int64_t first = 0;
  for (const Parameter* weight : weights_) {
    MEGATRON_ASSERT(weight->delayed_scaling == options_, weight->name,
                    " has other delayed scales than ", weights_[0]->name);
    MEGATRON_ASSERT(weight->placement.expert == experts_ && scale_groups(*weight, groups) == ranks_,
                    weight->name, " is used by other ranks than ", weights_[0]->name);
    const int64_t own = experts_of(*weight);
    DelayedScales& scales = scales_[weight];
    scales.state = experts_ ? state_.narrow(0, first, own) : state_.select(0, first);
    scales.amax = experts_ ? amax_.narrow(0, first, own) : amax_.select(0, first);
    first += own;
  }
}

void DelayedScaling::update() {
  const at::NoGradGuard no_grad;
  for (const ProcessGroup* group : ranks_) group->all_reduce(amax_, ReduceOp::kMax)->wait();
  const int64_t slots = amax_.numel();
  ::megatron::update_delayed_scales(state_.view({slots, -1}), amax_.view({slots}), options_,
                                    /*keep_unmeasured=*/experts_);
  set_measured(true);
}

at::Tensor DelayedScaling::state(const Parameter& weight) const {
  const auto found = scales_.find(&weight);
  MEGATRON_ASSERT(found != scales_.end(), weight.name, " has no delayed scales here");
  return found->second.state;
}

void DelayedScaling::loaded() { set_measured(!state_.select(2, 0).eq(0).any().item<bool>()); }

void DelayedScaling::set_measured(bool measured) {
  for (auto& [weight, scales] : scales_) scales.measured = measured;
}

}  // namespace megatron
