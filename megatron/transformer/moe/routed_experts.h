// The routed experts of a layer: every token goes to the experts that a router chose for it.
#pragma once

#include <memory>

#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/moe/grouped_mlp.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

struct RoutedExpertsOptions {
  GroupedMlpOptions mlp;
  TokenDispatcherType dispatcher = TokenDispatcherType::kAlltoall;
  // --moe-expert-rank-capacity-factor: bounds the rows that a rank holds at a time, not the rows
  // that it computes; 0: no bound.
  double rank_capacity_factor = 0.0;
  // The weight multiplies the input of its expert, not what the activation gives; one choice only.
  bool weights_on_input = false;
};

// y_i = sum over the choices j of token i of weight_ij * expert_j(x_i), in fp32 (fp64), rounded
// once.
//
//   x        [R, h]   tokens of this rank; R may be 0 and differ between ranks
//   choices  [R, k]   int32, each expert at most once in a row; -1: dropped
//   weights  [R, k]   fp32 (fp64); differentiable, as is x
//
// Parameters: those of GroupedMlp, as linear_fc1.{weight, bias} and linear_fc2.{weight, bias}.
//
// Communication: token_dispatcher.h, in the forward and in the backward, by every rank of the group
// that holds the experts. A forward is a pure function of its arguments and the parameters. Must
// outlive its graphs.
class RoutedExperts : public Module {
 public:
  RoutedExperts(const RoutedExpertsOptions& options, const ParallelGroups& groups);
  at::Tensor forward(const at::Tensor& x, const at::Tensor& choices, const at::Tensor& weights,
                     const LayerContext& context);

 private:
  const RoutedExpertsOptions options_;
  const ExpertGroups groups_;
  GroupedMlp mlp_;
};

}  // namespace megatron
