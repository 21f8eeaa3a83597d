// Mixture of experts in place of the MLP: a router, routed experts, and a shared expert.
//
//   x' = norm(x),  l = A x' or x'        A only with --moe-latent-size
//   y  = B sum_j w_j expert_j(l) + shared(x') sigmoid(g x')
//
// with the choices j and weights w of the router (moe/routing.h), B and the gate g only where asked
// for.
#pragma once

#include <memory>

#include "megatron/nn/norm.h"
#include "megatron/nn/saved_tensors.h"
#include "megatron/transformer/feed_forward/mlp.h"
#include "megatron/transformer/moe/routed_experts.h"
#include "megatron/transformer/moe/router.h"

namespace megatron {

// The names of the losses that its router adds to ForwardContext::auxiliary_losses.
std::vector<std::string> moe_losses(const TransformerConfig& config, int64_t layer_number);

// How its router chooses.
RoutingOptions routing_options(const TransformerConfig& config);

// The MLP without a norm that the shared experts are; only where there are some.
TransformerConfig shared_experts_config(TransformerConfig config);

// Parameters: router.{weight, bias}, experts.linear_fc1.{weight, bias}, experts.linear_fc2.{weight,
// bias}, shared_experts.{linear_fc1, linear_fc2}.weight, shared_experts.gate_weight [1, h],
// fc1_latent_proj.weight [l, h], fc2_latent_proj.weight [h, l]. State: router.expert_bias. The norm
// of the input is input_norm().
//
// Communication: that of the router's losses, of the dispatch over the expert groups, and of the
// shared expert over tp. Where tensor ranks hold the same rows each routes its part of them, and
// the outputs are summed over tp; such a pass has no backward.
class MoELayer : public FeedForward {
 public:
  // `layer_number` is global and counts from 1.
  MoELayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
           const ParallelGroups& groups);
  ~MoELayer() override;
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  Norm* input_norm() override { return norm_.get(); }
  SublayerNames names() const override { return {"moe", "mlp_norm"}; }

 private:
  // The MLP that every token uses, and its gate.
  class SharedExperts;

  at::Tensor normed_of(const at::Tensor& x);
  SavedTensorScope::Keep keep_normed(const at::Tensor& x, const at::Tensor& normed);
  at::Tensor of_own_rows(const at::Tensor& rows, const Routing& routing);

  const TransformerConfig& config_;
  const ProcessGroup& tp_;
  const bool same_rows_;  // on all tensor ranks
  const int64_t latent_size_;
  std::unique_ptr<Norm> norm_;  // null: --norm-placement post
  Router router_;
  RoutedExperts experts_;
  std::unique_ptr<SharedExperts> shared_experts_;                            // null: none
  std::unique_ptr<ColumnParallelLinear> fc1_latent_proj_, fc2_latent_proj_;  // null: no latents
};

}  // namespace megatron
