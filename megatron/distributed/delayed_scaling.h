// Delayed scaling of the quantised linears of one model chunk: one packed state, one reduction per
// step.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include "megatron/nn/parameter.h"

namespace megatron {

struct ParallelGroups;

class DelayedScaling {
 public:
  // `weights` all have delayed_scaling, with equal options, and are all of experts or
  // none. The groups must outlive this.
  DelayedScaling(std::vector<const Parameter*> weights, const ParallelGroups& groups,
                 at::Device device);

  const DelayedScales& scales(const Parameter& weight) const { return scales_.at(&weight); }
  // Clears the amax values of this step.
  void restart() { amax_.zero_(); }
  // See DistributedDataParallel::update_delayed_scales().
  void update();
  // Call after loading the state. Synchronises with the device.
  void loaded();

  // The groups whose ranks all hold the same scales.
  const std::vector<const ProcessGroup*>& ranks() const { return ranks_; }
  // A weight's part of the state, [3, 1 + history_length]; of experts [E/e, 3, 1 + history_length].
  at::Tensor state(const Parameter& weight) const;

 private:
  void set_measured(bool measured);

  std::vector<const Parameter*> weights_;
  bool experts_;
  DelayedScalingOptions options_;
  std::vector<const ProcessGroup*> ranks_;
  at::Tensor state_;  // [weights (of experts: all their experts), 3, 1 + history_length]
  at::Tensor amax_;   // [the same, 3]
  std::unordered_map<const Parameter*, DelayedScales> scales_;
};

}  // namespace megatron
