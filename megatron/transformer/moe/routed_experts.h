// The routed experts of a layer: every token goes to the experts that a router chose for it.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "megatron/nn/activation_offload.h"
#include "megatron/nn/module.h"
#include "megatron/transformer/moe/grouped_mlp.h"
#include "megatron/transformer/moe/routing.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

struct ExpertsPass;

struct RoutedExpertsOptions {
  GroupedMlpOptions mlp;
  TokenDispatcherType dispatcher = TokenDispatcherType::kAlltoall;
  // --moe-expert-rank-capacity-factor: bounds the rows that a rank holds at a time, not the rows
  // that it computes; 0: no bound.
  double rank_capacity_factor = 0.0;
  // The weight multiplies the input of its expert, not what the activation gives; one choice only.
  bool weights_on_input = false;
  // The exchange of rows starts in begin(), and that of output gradients in the backward of end():
  // what is computed between the two overlaps with them.
  bool exchange_early = false;
  // Which modules' inputs --offload-modules names: expert_fc1, moe_act, and what else is saved.
  std::function<bool(std::string_view module)> offloads = {};
};

// y_i = base_i + sum over the choices j of token i of weight_ij * expert_j(x_i), in fp32 (fp64),
// rounded once.
//
//   x        [R, h]   tokens of this rank; R may be 0 and differ between ranks
//   routing           choices [R, k] int32, each expert at most once in a row, -1: dropped; weights
//                     [R, k] fp32 (fp64), differentiable, as is x; kept; padding, which changes no
//                     result
//
// Parameters: those of GroupedMlp, as linear_fc1.{weight, bias} and linear_fc2.{weight, bias}.
//
// Communication: token_dispatcher.h, in the forward and in the backward, by every rank of the group
// that holds the experts. A forward is a pure function of its arguments and the parameters. Must
// outlive its graphs.
class RoutedExperts : public Module {
 public:
  RoutedExperts(const RoutedExpertsOptions& options, const ParallelGroups& groups);

  // A forward that has begun.
  class Pass {
   private:
    friend class RoutedExperts;
    at::Tensor tokens_, weights_;
    std::shared_ptr<ExpertsPass> state_;
  };
  // Sends tokens to their experts, as far as that is begun early.
  Pass begin(const at::Tensor& x, const Routing& routing);
  // y. What autograd saves of the experts is saved here, or goes to `offload` (null: nothing does).
  //   base  [R, h] or undefined; differentiable
  at::Tensor end(Pass pass, const at::Tensor& base, OffloadedPass* offload = nullptr);

  // Both, without a base.
  at::Tensor forward(const at::Tensor& x, const Routing& routing) {
    return end(begin(x, routing), {});
  }

 private:
  const RoutedExpertsOptions options_;
  const ExpertGroups groups_;
  GroupedMlp mlp_;
};

}  // namespace megatron
