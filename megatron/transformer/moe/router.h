// The router of a layer of experts: which experts compute a token, and with which weights.
#pragma once

#include <optional>

#include "megatron/nn/module.h"
#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/moe/balance.h"
#include "megatron/transformer/moe/capacity.h"
#include "megatron/transformer/moe/perturbation.h"
#include "megatron/transformer/moe/routing.h"

namespace megatron {

struct RouterOptions {
  int64_t hidden_size = 0, num_experts = 0;
  RoutingOptions routing;
  bool sinkhorn = false;  // in place of the k highest scores; needs softmax and no groups
  bool fp64 = false;      // logits in fp64; else in fp32, in fp64 of an fp64 model
  bool add_bias = false;
  Init init;  // of weight and bias
  bool expert_bias = false;
  double bias_update_rate = 1e-3;
  BalanceOptions balance;
  std::optional<CapacityOptions> capacity;
  double jitter = 0.0;  // --moe-input-jitter-eps
  ForcedRouting forced;
  int64_t seed = 1234;             // of jitter and forced routing
  bool sequence_parallel = false;  // tensor ranks divide the rows
};

//   l = x W^T (+ b),   choices and weights: routing.h
//
// Parameters: weight [E, h], bias [E], whole on every rank. State: expert_bias [E] fp32.
class Router : public Module {
 public:
  // `layer_number` is global and counts from 1. The groups must outlive it.
  Router(const RouterOptions& options, int64_t layer_number, const ParallelGroups& groups);

  //   x        [s, b, h]  normed input (s/t with sequence parallelism)
  //   return   routing of the N = s b rows of x in memory order
  // In training adds its losses (balance.h), and counts assignments for the expert bias. A pass
  // that is recomputed makes the same choices and counts nothing again. Communication: that of
  // RouterBalance::losses().
  Routing forward(const at::Tensor& x, const LayerContext& context);
  const Parameter& weight() const { return weight_; }

 protected:
  // Assignments of this step, [E], without those of padding and dropped ones.
  at::Tensor step_counts() override;
  void step_ended(const at::Tensor& skipped) override;

 private:
  at::Tensor logits_of(const at::Tensor& x, const ForwardContext& pass);
  Routing routed(const at::Tensor& logits, const ForwardContext& pass);
  RouterPass chosen(const at::Tensor& logits, const at::Tensor& imposed,
                    const RouterSums& sums) const;
  Routing by_sinkhorn(const at::Tensor& logits, const LayerContext& context);
  at::Tensor imposed(const ForwardContext& pass) const;  // choices; undefined: none
  void record(const at::Tensor& choices, const ForwardContext& pass) const;
  void log(const at::Tensor& logits, const at::Tensor& choices, const ForwardContext& pass) const;
  void drop(Routing& routing, const ForwardContext& pass) const;
  at::Tensor replayed_kept(const at::Tensor& kept, const ForwardContext& pass) const;
  void count(const Routing& routing, const ForwardContext& pass);

  const RouterOptions options_;
  const int64_t layer_number_;
  const bool divides_rows_;  // each tensor rank has rows of its own
  const ProcessGroup& tp_;
  Parameter weight_, bias_;
  at::Tensor expert_bias_;  // undefined: none
  at::Tensor step_counts_;  // [E] int32, of this rank
  RouterBalance balance_;
  int64_t steps_ = 0;  // that have ended
};

}  // namespace megatron
