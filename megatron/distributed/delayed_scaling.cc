#include "megatron/distributed/delayed_scaling.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/nn/reduction.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"

namespace megatron {

DelayedScaling::DelayedScaling(std::vector<const Parameter*> weights, const ParallelGroups& groups,
                               at::Device device)
    : weights_(std::move(weights)),
      options_(*weights_.front()->delayed_scaling),
      ranks_(use_groups(weights_.front()->placement, groups)) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const auto count = static_cast<int64_t>(weights_.size());
  state_ = at::zeros({count, 3, 1 + options_.history_length}, options);
  amax_ = at::zeros({count, 3}, options);
  for (int64_t i = 0; i < count; ++i) {
    MEGATRON_ASSERT(weights_[i]->delayed_scaling == options_, weights_[i]->name,
                    " has other delayed scales than ", weights_[0]->name);
    MEGATRON_ASSERT(use_groups(weights_[i]->placement, groups) == ranks_, weights_[i]->name,
                    " is used by other ranks than ", weights_[0]->name);
    scales_[weights_[i]] = {state_.select(0, i), amax_.select(0, i), false};
  }
}

void DelayedScaling::update() {
  const at::NoGradGuard no_grad;
  for (const ProcessGroup* group : ranks_) group->all_reduce(amax_, ReduceOp::kMax)->wait();
  const int64_t slots = amax_.numel();
  ::megatron::update_delayed_scales(state_.view({slots, -1}), amax_.view({slots}), options_);
  set_measured(true);
}

at::Tensor DelayedScaling::state(const Parameter& weight) const {
  const auto found = std::find(weights_.begin(), weights_.end(), &weight);
  MEGATRON_ASSERT(found != weights_.end(), weight.name, " has no delayed scales here");
  return state_.select(0, found - weights_.begin());
}

void DelayedScaling::loaded() { set_measured(!state_.select(2, 0).eq(0).any().item<bool>()); }

void DelayedScaling::set_measured(bool measured) {
  for (auto& [weight, scales] : scales_) scales.measured = measured;
}

}  // namespace megatron
