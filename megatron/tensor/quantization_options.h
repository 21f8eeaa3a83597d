// How the products of linear layers are quantised: FP8 or FP4 operands, fp32 sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace megatron {

// kTensorwise one scale per tensor, from its current amax
// kDelayed one scale per tensor, from the amax values of earlier steps kBlockwise a scale per 128
// elements along the summed dimension (128 x 128 of a weight); powers of two kNvfp4 E2M1 with an
// E4M3 scale per 16 elements (16 x 16 of a weight) and an fp32 one per
//              tensor; emulated: rounded exactly, multiplied in bf16
enum class QuantizationRecipe : uint8_t { kNone, kTensorwise, kDelayed, kBlockwise, kNvfp4 };

// The role of a tensor in a linear layer: its input, its weight, or the gradient of its output.
enum class OperandRole : uint8_t { kInput, kWeight, kGradient };

// Delayed scaling. All lengths count optimizer steps: the scales of a step are fixed before it, so
// that they are independent of micro-batches, recomputation and pipeline order.
struct DelayedScalingOptions {
  int64_t history_length = 1;
  bool most_recent = true;  // scale by the last step's amax; else by the history's largest
  int64_t margin = 0;       // scales are divided by 2^margin
  at::ScalarType gradient_type = at::kFloat8_e5m2;
  bool operator==(const DelayedScalingOptions&) const = default;
};

// The delayed scales of one weight's linear layer: one entry per OperandRole. Of a weight of E
// experts state [E, 3, 1 + history_length] and amax [E, 3]; there a scale of 0 was never measured,
// and an expert without rows keeps its scales and histories.
struct DelayedScales {
  at::Tensor state;       // [3, 1 + history_length] fp32: the scale, then amax values, newest first
  at::Tensor amax;        // [3] fp32: amax of this step so far
  bool measured = false;  // false before the first step: scale by the current amax
};

struct QuantizationOptions {
  QuantizationRecipe recipe = QuantizationRecipe::kNone;
  bool hybrid = false;          // output gradients in E5M2; else everything in E4M3
  bool weight_gradient = true;  // false: weight gradient products in the model's type
  DelayedScalingOptions delayed = {};

  bool enabled() const { return recipe != QuantizationRecipe::kNone; }
  at::ScalarType type(OperandRole role) const {
    return hybrid && role == OperandRole::kGradient ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  }
  // Every dimension of an operand must be a multiple of this.
  int64_t alignment() const { return recipe == QuantizationRecipe::kBlockwise ? 128 : 16; }
};

}  // namespace megatron
