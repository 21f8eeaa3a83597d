// How the products of linear layers are quantised: FP8 or FP4 operands, fp32 sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace megatron {

// kTensorwise  one scale per tensor, from its own largest value
// kDelayed     one scale per tensor, from the largest values of earlier steps
// kBlockwise   a scale per 128 elements along the sum, per 128 x 128 of a weight; powers of two
// kNvfp4       E2M1 with an E4M3 scale per 16 elements (16 x 16 of a weight) and an fp32 one per
//              tensor; emulated: rounded exactly, multiplied in bf16
enum class QuantizationRecipe : uint8_t { kNone, kTensorwise, kDelayed, kBlockwise, kNvfp4 };

// What a tensor is in a linear layer: its input, its weight, or the gradient of its output.
enum class OperandRole : uint8_t { kInput, kWeight, kGradient };

// Delayed scaling. Every length counts optimizer steps: the scales of a step are fixed before it,
// so that they do not depend on micro-batches, recomputation or the order of a pipeline.
struct DelayedScalingOptions {
  int64_t history_length = 1;
  bool most_recent = true;  // scale by the last step's largest value; else by the history's
  int64_t margin = 0;       // scales are divided by 2^margin
  at::ScalarType gradient_type = at::kFloat8_e5m2;
  bool operator==(const DelayedScalingOptions&) const = default;
};

// The scales of the tensors around one weight under delayed scaling; an entry per OperandRole.
struct DelayedScales {
  at::Tensor state;  // [3, 1 + history_length] fp32: the scale, then largest values, newest first
  at::Tensor amax;   // [3] fp32: the largest values of this step so far
  bool measured = false;  // false before the first step: tensors are scaled by their own values
};

struct QuantizationOptions {
  QuantizationRecipe recipe = QuantizationRecipe::kNone;
  bool hybrid = false;          // output gradients in E5M2; else everything in E4M3
  bool weight_gradient = true;  // false: products of the weight gradient in the model's type
  DelayedScalingOptions delayed = {};

  bool enabled() const { return recipe != QuantizationRecipe::kNone; }
  at::ScalarType type(OperandRole role) const {
    return hybrid && role == OperandRole::kGradient ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  }
  // What every dimension of an operand is a multiple of.
  int64_t alignment() const { return recipe == QuantizationRecipe::kBlockwise ? 128 : 16; }
};

}  // namespace megatron
