// Gradient norm and parameter update over flat tensors, on CPU and CUDA. See kernels/adamw.h for
// the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "megatron/kernels/adamw.h"

namespace megatron {

// The flat tensors of one optimizer, on one device, and its table of blocks.
struct FlatUpdate {
  at::Tensor grad;    // [n] fp32 or fp64
  at::Tensor master;  // [n] as grad, or bf16
  // Of the update rule, in its order, [n] as grad or bf16. AdamW: exp_avg, exp_avg_sq; SGD: the
  // momentum buffer
  std::vector<at::Tensor> states;
  at::Tensor value;     // [n] bf16 or fp16; undefined when the master weight is the value
  at::Tensor blocks;    // [num_blocks * sizeof(UpdateBlock)] uint8, made by upload_blocks()
  at::Tensor partials;  // [num_blocks] fp64
};

// Fills blocks and partials, on the device of `update.grad`. sum_of_squares() reads only these and
// the gradient.
void upload_blocks(FlatUpdate& update, const std::vector<UpdateBlock>& blocks);

// sum = sum of squares of the gradients over all blocks that count; [1] fp64. Independent of the
// number of threads.
void sum_of_squares(FlatUpdate& update, at::Tensor& sum);

// Advances the record `state`, [sizeof(StepState)] uint8; sum and total_weight are [1] fp64 on its
// device.
void step_control(at::Tensor& state, const ParameterSchedule& schedule, const StepRules& rules,
                  const at::Tensor& sum, const at::Tensor& total_weight, int64_t samples);

// Performs the update of the record; does nothing if it says skip.
void adamw_update(FlatUpdate& update, const at::Tensor& state, const AdamWConstants& constants);
void sgd_update(FlatUpdate& update, const at::Tensor& state, double momentum);

}  // namespace megatron
