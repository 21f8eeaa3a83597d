// The rows of hidden states that a loss counts, so that heads and logits compute no others.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/process_group.h"

namespace megatron {

struct CountedRows {
  // [m, b, h], or [m/t, b, h] where tensor ranks divide rows: this rank's part of dim 0. Samples
  // with fewer counted positions have others behind them, whose weight is 0.
  at::Tensor hidden;
  at::Tensor labels;   // [m, b] int64
  at::Tensor weights;  // [m, b], in the type of the loss
};

//   hidden     [s, b, h], or [s/t, b, h] with `sequence_parallel`; of any segment's last layer
//   labels     [b, s] int64
//   loss_mask  [b, s]
//   most       positions of a sample that count at most; 0: not known
//
// Differentiable in hidden. Positions stay in their order. m is `most`, at most s, rounded up to a
// multiple of the tensor ranks. Deterministic, no size depends on the mask.
//
// Communication: with sequence_parallel a reduce-scatter of [m, b, h] over tp; backward an
// all-gather.
CountedRows counted_rows(const at::Tensor& hidden, const at::Tensor& labels,
                         const at::Tensor& loss_mask, int64_t most, bool sequence_parallel,
                         const ProcessGroup& tp);

}  // namespace megatron
