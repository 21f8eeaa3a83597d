// Gradients for the proof that a layout updates the weights as one rank does, to the bit.
//
// No forward and no backward run. The gradients of a step are integers, drawn by parameter and
// element, each divided into integers over the data ranks, partial gradients, stages, micro-batches
// and uses that sum it. Every sum of some of these is exact in the type in which the run sums, so
// that no order of sums rounds; if that is fp32, they are too wide for bf16. All that follows the
// backward is thus determined to the bit: sums over ranks, the norm, clipping, states, weights, the
// loss scale.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "megatron/training/setup.h"

namespace megatron {

// Steps of such a proof. In the third and the fifth one contribution of one rank is infinite,
// unless the run applies such steps: first of the last data rank, to the first layer; then of the
// first data rank, but the last stage and tensor rank, to the last layer.
inline constexpr int kUpdateSteps = 6;

// The run with a learning rate and a loss scale that change within these steps.
Arguments exact_update_arguments(Arguments arguments);

// Reports the gradients of step `step` (counts from 0) of a run of exact_update_arguments() to the
// stores, after values were acquired as by a forward, and waits for the sums over ranks. Returns
// totals as accumulate_gradients() does, [2] fp64: no loss, and its weight. Infinite are those of
// parameters whose names begin with `infinite` alone. Collective.
at::Tensor report_exact_gradients(TrainedModel& model, const Arguments& arguments,
                                  const StepOptions& options, int step,
                                  std::string_view infinite = {});

}  // namespace megatron
