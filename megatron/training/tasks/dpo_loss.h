// The loss of direct preference optimisation (DPO), from per-token losses.
//
// log pi(y | x) is the sum of the log-probabilities of the response's tokens. For pairs of a
// preferred response c and a rejected one r, with the reference model ref:
//
//   m = log pi(c) - log ref(c) - (log pi(r) - log ref(r))
//   loss = -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m) + w * -log pi(c) / |c|
//
// e is --dpo-label-smoothing, the probability that a label is flipped; w is --dpo-sft-weight.
// Source: Rafailov et al. 2023 (arXiv:2305.18290) equation 7; Mitchell 2023 for e; Pang et al. 2024
// (arXiv:2404.19733) for w.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/comm/process_group.h"
#include "megatron/models/model.h"

namespace megatron {

struct DpoOptions {
  double beta = 0.1;
  double label_smoothing = 0.0;
  double sft_weight = 0.0;
};

// log pi of each sequence, [b]; differentiable.
//
//   token_losses  [s, b], the s tokens of this context-parallel rank
//   loss_mask     [b, s], 1 where the label is a token of the response
//
// Communication: forward all-reduce of b numbers over cp; backward none.
at::Tensor sequence_log_probs(const at::Tensor& token_losses, const at::Tensor& loss_mask,
                              const ProcessGroup& cp);

struct DpoLoss {
  Loss loss;           // sum over pairs, and their number; divided over the context-parallel ranks
  at::Tensor metrics;  // [4] fp64, sums over pairs, divided as the loss: see kDpoMetrics
};

// beta (log pi - log ref) of the chosen and of the rejected response, their difference, and whether
// it is positive.
inline constexpr const char* kDpoMetrics[] = {"rewards chosen", "rewards rejected",
                                              "rewards margin", "rewards accuracy"};

// Rows 2 i of the batch are the chosen responses, rows 2 i + 1 the rejected ones. Pairs without an
// unmasked token have weight 0. Every context-parallel rank computes the whole loss and returns 1/c
// of it, so that the sum over the ranks is the loss.
//
//   reference     [b], sequence_log_probs of the reference model
DpoLoss dpo_loss(const at::Tensor& token_losses, const at::Tensor& loss_mask,
                 const at::Tensor& reference, const DpoOptions& options, const ProcessGroup& cp);

// What each sequence adds to the weight of this loss, [b]: half of its pair, 0 for an empty pair.
// `mask_sums` [b]: sums of the loss masks of whole sequences.
at::Tensor halves_of_pairs(const at::Tensor& mask_sums);

}  // namespace megatron
