// Forward and backward of a rank's chunks for the micro-batches of one iteration, in the order of
// the pipeline schedule.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "megatron/training/train_step.h"

namespace megatron {

struct RoutingReplay;

struct PassOptions {
  int num_microbatches = 1;
  bool training = false;       // with dropout and backward; false: forward only
  bool per_token_loss = true;  // false: each micro-batch's loss is divided by its own weight
  at::Tensor loss_scale;       // [] the loss is multiplied by it before the backward
  const RoutingReplay* routing = nullptr;  // choices of routers to record or impose; null: neither
};

// Runs all micro-batches; gradients are accumulated in the chunks' stores and not yet reduced over
// ranks. `next_batch` returns the micro-batches in order; every stage reads them. Returns the sum
// of the losses of all tokens, their weight, the sums of the task's metrics and, in training, the
// (sum, weight) of each auxiliary loss of the model, [2 + m + 2 n] fp64, over all ranks. For a task
// with a reference model, all micro-batches are read and run through that model first.
//
// Communication: activations between stages; all-reduces of these numbers over dp_cp and pp, and
// over the world where encoders have ranks of their own; with sequence parallelism, one over tp if
// there are auxiliary losses.
at::Tensor run_passes(TrainedModel& model, const PretrainTask& task, const PassOptions& options,
                      const std::function<Batch()>& next_batch, Timers& timers);

}  // namespace megatron
