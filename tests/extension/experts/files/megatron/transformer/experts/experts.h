// Experts in place of the MLP of a layer: of several MLPs, the one that a router chooses for each
// token.
#pragma once

#include <memory>
#include <vector>

#include "megatron/transformer/experts/experts_cost.h"
#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {

//   p = softmax(W norm(x)),   j = argmax p,   y = p_j MLP_j(norm(x))
//
// and the auxiliary loss "load_balance", which is least when all experts get as many tokens:
// kBalance E sum over tokens and experts of f_e p_e, f being the part of the token's sequence that
// chose e. Source: Fedus et al. 2021 (arXiv:2101.03961).
//
// Parameters: norm.{weight, bias}, router.weight [E, h], experts.J.{linear_fc1, linear_fc2} as of
// an MLP without a norm, each on one of the ep expert ranks and divided over etp, the tensor ranks.
//
// Every expert rank sees all tokens of its group, and computes its experts for all of them.
// Communication: over ep all-gather of norm(x) and p, reduce-scatter of y, and the same in the
// backward; that of the MLPs over etp; an all-reduce of [b, E] for the loss over cp, and over tp
// with sequence parallelism. Not with offloading of activations or ranks of unequal sequences.
class Experts : public FeedForward {
 public:
  Experts(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
          const ParallelGroups& groups);
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;

 private:
  void add_balance_loss(const at::Tensor& p, const at::Tensor& chosen, const ForwardContext& pass);

  const ParallelGroups& groups_;
  const bool divides_rows_;                // each tensor rank has rows of its own
  const TransformerConfig expert_config_;  // without norms
  std::unique_ptr<Norm> norm_;             // null: --norm-placement post
  ColumnParallelLinear router_;
  std::vector<std::unique_ptr<MLP>> experts_;  // those of this rank
};

}  // namespace megatron
