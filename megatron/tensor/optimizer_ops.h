// Gradient norm and parameter update over flat tensors, on CPU and CUDA. See kernels/adamw.h for
// the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "megatron/kernels/adamw.h"

namespace megatron {

// The flat tensors of one optimizer, on one device, and its table of work.
struct FlatUpdate {
  at::Tensor grad;        // [n] fp32 or fp64
  at::Tensor master;      // [n] as grad, or bf16
  at::Tensor exp_avg;     // [n] as grad, or bf16
  at::Tensor exp_avg_sq;  // [n] as grad, or bf16; undefined for SGD
  at::Tensor value;       // [n] bf16 or fp16; undefined when the master weight is the value
  at::Tensor blocks;      // [num_blocks * sizeof(UpdateBlock)] uint8, made by upload_blocks()
  at::Tensor partials;    // [num_blocks] fp64
};

// Fills blocks and partials, which with the gradient are all that sum_of_squares() reads, on the
// device of `update.grad`.
void upload_blocks(FlatUpdate& update, const std::vector<UpdateBlock>& blocks);

// sum = sum of squares of the gradients of all blocks that count; [1] fp64. Independent of the
// number of threads.
void sum_of_squares(FlatUpdate& update, at::Tensor& sum);

// Advances the record `state`, [sizeof(StepState)] uint8; sum and total_weight are [1] fp64 on its
// device.
void step_control(at::Tensor& state, const ParameterSchedule& schedule, const StepRules& rules,
                  const at::Tensor& sum, const at::Tensor& total_weight, int64_t samples);

// The update that the record asks for; nothing when it says skip.
void adamw_update(FlatUpdate& update, const at::Tensor& state, const AdamWConstants& constants);
void sgd_update(FlatUpdate& update, const at::Tensor& state, double momentum);

}  // namespace megatron
