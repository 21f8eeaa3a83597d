// How a router chooses experts and weighs them: pure functions of its logits.
//
//   logits   [N, E] fp32 (fp64), one row per token
//   choices  [N, k] int32, experts of a token by descending selection score
//   weights  [N, k] in the type of the logits
//
// Equal scores are ordered by index, the lowest first, so that a tie is no coin. Logits that are
// NaN give k distinct experts and weights that are NaN. N may be 0. No function waits for the
// device.
//
// Source: Shazeer et al. 2017 (arXiv:1701.06538); sigmoid scores, bias and groups: DeepSeek-V3
// (arXiv:2412.19437) and Megatron-LM's moe_utils.py, which leaves the order of ties to torch.topk.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "megatron/kernels/experts/routing.h"

namespace megatron {

struct Routing {
  at::Tensor choices;  // [N, k] int32
  at::Tensor weights;  // [N, k] fp32 (fp64), differentiable; 0 for dropped choices
  // With a capacity (capacity.h), both bool:
  at::Tensor kept;       // [N, k] choices that were not dropped; undefined: all
  at::Tensor padding;    // [N, E] rows that fill an expert, with weight 0; undefined: none
  int64_t capacity = 0;  // with padding: the rows of every expert
};

// The choices. `bias` [E] fp32 is added to the scores for the selection alone; undefined: none. It
// needs sigmoid or sqrtsoftplus. Not differentiable.
at::Tensor choose_experts(const at::Tensor& logits, const at::Tensor& bias,
                          const RoutingOptions& options);

// The weights of given choices:
//   softmax                  of the chosen logits
//   softmax, pre_softmax     over all experts, not normalised again
//   sigmoid, sqrtsoftplus    s_j / (sum of the chosen s + 1e-20), for k = 1 s_j, with s =
//                            sigmoid(l) or sqrt(ln(1 + e^l))
// times scaling_factor. Differentiable in the logits.
at::Tensor routing_weights(const at::Tensor& logits, const at::Tensor& choices,
                           const RoutingOptions& options);

// Both.
Routing route(const at::Tensor& logits, const at::Tensor& bias, const RoutingOptions& options);

// The k best columns of each row, [N, k] int32.
at::Tensor top_experts(const at::Tensor& scores, int64_t k);

// Assignments by sequence and expert, [b, E] int32. Rows are position-major and sequence-minor, as
// in memory: row i belongs to sequence i mod b. Those of rows that are padding ([N] bool;
// undefined: none) do not count.
at::Tensor count_assignments(const at::Tensor& choices, const at::Tensor& padding, int64_t b,
                             int64_t num_experts);

// Choices and weights by Sinkhorn's algorithm. While training, the choice is the top k of a matrix
// near exp(logits) whose rows and columns sum to 1/N and 1/E; otherwise of the scores. The weights
// are sigmoid(l) for k = 1, else the softmax over all experts, at the choices. The rows are those
// of this rank, so that the choices depend on the layout.
// Source: Clark et al. 2022 (arXiv:2202.01169), Megatron-LM's sinkhorn().
at::Tensor sinkhorn_choices(const at::Tensor& logits, int64_t k, bool training);
at::Tensor sinkhorn_weights(const at::Tensor& logits, const at::Tensor& choices);

// That matrix, [N, E]; iterates until the mean change of the columns' factors is at most 1e-4, or
// kMaxSinkhornIterations times.
inline constexpr int kMaxSinkhornIterations = 100;
at::Tensor sinkhorn(const at::Tensor& logits);

}  // namespace megatron
