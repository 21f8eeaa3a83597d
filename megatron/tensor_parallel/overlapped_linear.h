// Products of linear layers with sequence parallelism, in parts of the sequence: what a rank has is
// multiplied while the rest is on its way, what is ready leaves while the rest is multiplied.
// Not differentiable; the layers write their own backwards.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "megatron/comm/process_group.h"

namespace megatron {

// An all-gather over dim 0 under way: x [s/t, ...] of all ranks to [s, ...].
class GatheredRows {
 public:
  GatheredRows(const at::Tensor& x, const ProcessGroup& tp);
  const at::Tensor& wait();
  const at::Tensor& own() const { return own_; }

 private:
  at::Tensor own_, whole_;
  std::shared_ptr<Work> work_;
};

// x w^T (+ bias) of all rows. x [s/t, ..., k], w [n, k]; returns [s, ..., n].
// Communication: all-gather, under the product of this rank's rows.
at::Tensor gathered_linear_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                                   const ProcessGroup& tp);

// dy w of all rows, and all rows of dy. dy [s/t, ..., n], w [n, k]; returns [s, ..., k].
// Communication: as above.
at::Tensor gathered_linear_input_grad(GatheredRows& dy, const at::Tensor& w,
                                      const ProcessGroup& tp);

// This rank's rows of the sum of x w^T over the ranks. x [s, ..., k], w [n, k]; returns
// [s/t, ..., n]. Summed in fp32 (fp64), in the order of the ranks.
// Communication: the rows of every other rank go there, under the product of the next ones.
at::Tensor scattered_linear_forward(const at::Tensor& x, const at::Tensor& w,
                                    const ProcessGroup& tp);

}  // namespace megatron
