// The passes of a router over its logits (kernels/experts/routing.h): choices, weights, sums of
// losses, and the gradient of all of them. Not differentiable: the router writes its own backward.
// Nothing waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "megatron/kernels/experts/routing.h"

namespace megatron {

// What a pass adds up over its rows for the losses.
struct RouterSums {
  int64_t sequences = 1;  // b: row i belongs to sequence i mod b
  at::Tensor padding;     // [N] bool, rows that count nowhere; undefined: none
  bool shares = false;    // the sums of RouterForward
  bool squares = false;   // with those of logsumexp
  bool counts = false;
};

struct RouterPass {
  at::Tensor choices;  // [N, k] int32
  at::Tensor weights;  // [N, k] in the type of the logits
  at::Tensor counts;   // [b, E] int32; undefined: not wanted
  at::Tensor sums;     // [b, E + 2, parts] fp64; undefined: not wanted
};

// Choices and their weights, and sums beside them.
//   logits   [N, E] fp32 (fp64)
//   bias     [E] or undefined
//   choices  [N, k] int32: given; undefined: made
RouterPass router_pass(const at::Tensor& logits, const at::Tensor& bias,
                       const RoutingOptions& options, const at::Tensor& choices = {},
                       const RouterSums& sums = {});
// The choices alone.
at::Tensor router_choices(const at::Tensor& logits, const at::Tensor& bias,
                          const RoutingOptions& options);
// The sums alone.
RouterPass router_sums(const at::Tensor& logits, const RoutingOptions& options,
                       const RouterSums& sums);

// Losses of the sums of a pass. Without counts there is none but that of the squares.
struct RouterLosses {
  std::array<at::Tensor, kBalanceTerms> losses;  // [] fp64; undefined: its coefficient is 0
  at::Tensor weights;                            // [terms] fp64
  at::Tensor shares;                             // [b + 2, E] fp64
  at::Tensor of_sequence;                        // [b] fp64
  std::array<double, kBalanceTerms> coefficients = {};
};
//   step_counts   [E] int64; undefined where the coefficient of the global loss is 0
//   of_sequence   [b] fp64: weight of a token
RouterLosses router_losses(const RouterPass& pass, const at::Tensor& step_counts,
                           const at::Tensor& of_sequence, int64_t topk,
                           const std::array<double, kBalanceTerms>& coefficients);

// dlogits [N, E] from the gradients of weights, [N, k], and of losses, [] fp64; undefined ones are
// 0. Of `sums` the rows' sequences and padding are read.
at::Tensor router_backward(const at::Tensor& logits, const RoutingOptions& options,
                           const at::Tensor& choices, const at::Tensor& dweights,
                           const RouterSums& sums, const RouterLosses& losses,
                           const std::array<at::Tensor, kBalanceTerms>& dlosses);

// Adds assignments by sequence and expert to counts [b, E] int32.
//   choices  [N, k] int32; negative: counts nowhere
//   kept     [N, k] bool; undefined: all
//   padding  [N] bool, rows that do not count; undefined: none
void add_assignments(const at::Tensor& choices, const at::Tensor& kept, const at::Tensor& padding,
                     const at::Tensor& counts);

}  // namespace megatron
