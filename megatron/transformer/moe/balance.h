// Losses of a router that balance its experts.
//
// With p_ie the score of token i for expert e as a share of the token's scores, a_i its weight
// (transformer/layer/token_weights.h) and k choices of E experts:
//
//   balance   coefficient E/k  sum_e [sum_i a_i p_ie] phi_e
//   z         coefficient      sum_i a_i lse(l_i)^2
//
// phi_e is the share of tokens for which e is among the k highest p_ie, over the scope of token i;
// it is a constant for the gradient.
//
//   sequence  its sequence
//   micro     its micro-batch on the tensor and context ranks
//   global    all micro-batches of the step up to this one, on the tensor, context and data ranks
//
// All are sums over tokens that are divided once by the weight of the main loss, so that perfect
// balance gives 1 x coefficient whatever the layout. Megatron-LM divides the gradient of the global
// loss by the data ranks, and takes its shares as the mean over micro-batches.
//
// Source: Fedus et al. 2021 (arXiv:2101.03961), Zoph et al. 2022 (arXiv:2202.08906), Qiu et al.
// 2025 (arXiv:2501.11873).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/experts/routing.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

// Coefficients; 0: no such loss.
struct BalanceOptions {
  double micro = 0.0;      // aux_loss
  double sequence = 0.0;   // seq_aux_loss
  double global = 0.0;     // global_aux_loss
  double z = 0.0;          // --moe-z-loss-coeff
  bool per_layer = false;  // --moe-per-layer-logging: logs those of each layer, too
  bool has_balance() const { return micro != 0.0 || sequence != 0.0 || global != 0.0; }
};

// The names under which these losses are logged, Megatron's: load_balancing_loss,
// seq_load_balancing_loss, global_load_balancing_loss, z_loss. A log shows a loss without its
// coefficient, averaged over the layers that have it.
std::vector<std::string_view> balance_loss_names(const BalanceOptions& options);

// The names of those of one layer, moe/<name>_layer_<i> with i from 0, of a layer number from 1.
std::vector<std::string> layer_loss_names(const BalanceOptions& options, int64_t layer_number);

// The losses of one router.
class RouterBalance {
 public:
  // `divides_rows`: each tensor rank has rows of its own. The groups must outlive it.
  RouterBalance(const BalanceOptions& options, int64_t layer_number, RouterScore score,
                int64_t topk, bool divides_rows, const ParallelGroups& groups);

  // Whether a pass has losses.
  bool wanted(const ForwardContext& pass) const;

  // The losses of a training pass, in three steps: what the pass over the logits (router_pass())
  // sums for them, the losses of these sums, and their addition to context.pass.auxiliary_losses,
  // which may not be null, once they are connected to the logits (router_outputs()).
  //   rows  s b of this rank
  // Communication of losses(): for balance losses one all-reduce of [b, E] integers over the
  // context ranks and one over the tensor ranks that divide rows; for the global one also of [E]
  // over the data ranks. None when the pass is recomputed.
  RouterSums sums(int64_t rows, const ForwardContext& pass) const;
  RouterLosses losses(const RouterPass& sums, const ForwardContext& pass);
  void add(const std::array<at::Tensor, kBalanceTerms>& losses, const at::Tensor& weights,
           const ForwardContext& pass) const;

  // All of them, for logits [s b, E] fp32 (fp64), differentiable, whose weights are computed
  // elsewhere.
  void add_losses(const at::Tensor& logits, const LayerContext& context);

  // Forgets the micro-batches of the step.
  void step_ended();

 private:
  // The counts [b, E] of whole sequences, or those of the run that is replayed.
  at::Tensor replayed(const at::Tensor& counts, const ForwardContext& pass) const;
  at::Tensor count_globally(const at::Tensor& counts, bool discarded);

  const BalanceOptions options_;
  const int64_t layer_number_;
  const RoutingOptions routing_;
  const std::array<double, kBalanceTerms> coefficients_;
  const bool divides_rows_;
  const ParallelGroups& groups_;
  at::Tensor step_counts_;  // [E] int64: of the step's micro-batches so far
};

}  // namespace megatron
