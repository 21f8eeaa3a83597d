#include "megatron/transformer/moe/router.h"

#include "megatron/base/check.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/expert_bias.h"
#include "megatron/transformer/moe/router_function.h"
#include "megatron/transformer/moe/router_product.h"
#include "megatron/transformer/moe/routing_replay.h"

namespace megatron {
namespace {

// Of the rows between layers.
TokenPositions row_positions(const ForwardContext& pass) {
  return pass.rows.position.defined() ? pass.rows : pass.place;
}

}  // namespace

Router::Router(const RouterOptions& options, int64_t layer_number, const ParallelGroups& groups)
    : options_(options),
      layer_number_(layer_number),
      divides_rows_(options.sequence_parallel && groups.tp.size() > 1),
      tp_(groups.tp),
      balance_(options.balance, layer_number, options.routing.score, options.routing.topk,
               divides_rows_, groups) {
  MEGATRON_ASSERT(!options.sinkhorn || (options.routing.num_groups == 0 && !options.expert_bias),
                  "sinkhorn with groups or a bias");
  weight_.local_shape = weight_.global_shape = {options.num_experts, options.hidden_size};
  bias_.local_shape = bias_.global_shape = {options.num_experts};
  bias_.role = ParameterRole::kBias;
  for (Parameter* parameter : {&weight_, &bias_}) {
    parameter->init = options.init;
    if (divides_rows_) parameter->placement.partial_grad.insert(Axis::kTensor);
  }
  add("weight", &weight_);
  if (options.add_bias) add("bias", &bias_);
  if (!options.expert_bias) return;
  expert_bias_ = at::zeros({options.num_experts});
  add_state("expert_bias", &expert_bias_);
}

Routing Router::forward(const at::Tensor& x, const LayerContext& context) {
  check_shape("input of the router", x, {-1, -1, options_.hidden_size});
  const ForwardContext& pass = context.pass;
  const at::Tensor logits = logits_of(x, pass);
  Routing routing = options_.sinkhorn ? by_sinkhorn(logits, context) : routed(logits, pass);
  if (options_.capacity) drop(routing, pass);
  if (pass.training) count(routing, pass);
  return routing;
}

// One pass over the logits for choices, weights and losses. Choices that were made before, in
// another run or in the first run of this body, are taken over.
Routing Router::routed(const at::Tensor& logits, const ForwardContext& pass) {
  const bool has_losses = balance_.wanted(pass);
  const RouterSums sums = has_losses ? balance_.sums(logits.size(0), pass) : RouterSums{};
  RouterPass computed;
  const at::Tensor choices = computed_once(pass.tape, [&] {
    computed = chosen(logits, imposed(pass), sums);
    record(computed.choices, pass);
    log(logits, computed.choices, pass);
    return computed.choices;
  });
  if (!computed.choices.defined())
    computed = router_pass(logits, {}, options_.routing, choices, sums);
  const RouterLosses losses = has_losses ? balance_.losses(computed, pass) : RouterLosses{};
  const RouterOutputs outputs = router_outputs(logits, options_.routing, computed, sums, losses);
  if (has_losses) balance_.add(outputs.losses, losses.weights, pass);
  return {choices, outputs.weights, {}, {}};
}

RouterPass Router::chosen(const at::Tensor& logits, const at::Tensor& imposed,
                          const RouterSums& sums) const {
  return router_pass(logits, expert_bias_, options_.routing, imposed, sums);
}

Routing Router::by_sinkhorn(const at::Tensor& logits, const LayerContext& context) {
  const ForwardContext& pass = context.pass;
  Routing routing;
  routing.choices = computed_once(pass.tape, [&] {
    at::Tensor choices = imposed(pass);
    if (!choices.defined())
      choices = sinkhorn_choices(logits.detach(), options_.routing.topk, pass.training);
    record(choices, pass);
    return choices;
  });
  routing.weights = sinkhorn_weights(logits, routing.choices);
  balance_.add_losses(logits, context);
  return routing;
}

at::Tensor Router::logits_of(const at::Tensor& x, const ForwardContext& pass) {
  const bool perturbed = pass.training && options_.jitter > 0.0;
  const at::Tensor input =
      perturbed
          ? jittered(x, options_.jitter, random_key(options_.seed, "router_jitter", layer_number_),
                     row_positions(pass))
          : x;
  const bool fp64 = options_.fp64 || weight_.value.scalar_type() == at::kDouble;
  const at::Tensor logits = router_logits(input, weight_, options_.add_bias ? &bias_ : nullptr,
                                          fp64 ? at::kDouble : at::kFloat);
  if (!options_.forced.enabled) return logits;
  return forced_logits(logits, options_.forced,
                       random_key(options_.seed, "forced_routing", layer_number_),
                       row_positions(pass), steps_);
}

at::Tensor Router::imposed(const ForwardContext& pass) const {
  if (pass.routing == nullptr || pass.routing->imposed == nullptr) return {};
  return pass.routing->imposed->find(layer_number_, row_positions(pass), pass.layer_use);
}

void Router::record(const at::Tensor& choices, const ForwardContext& pass) const {
  if (pass.routing == nullptr || pass.routing->record == nullptr || pass.discarded) return;
  pass.routing->record->record(layer_number_, row_positions(pass), choices, pass.layer_use);
}

void Router::log(const at::Tensor& logits, const at::Tensor& choices,
                 const ForwardContext& pass) const {
  if (pass.routing == nullptr || pass.routing->log == nullptr || pass.discarded) return;
  const bool own = pass.routing->imposed == nullptr;
  pass.routing->log->record(layer_number_, row_positions(pass), pass.layer_use, logits,
                            own ? choices : chosen(logits, {}, {}).choices, expert_bias_);
}

// A choice that is dropped stays so when the pass is recomputed.
void Router::drop(Routing& routing, const ForwardContext& pass) const {
  const int64_t experts = options_.num_experts;
  routing.kept = computed_once(pass.tape, [&] {
    return replayed_kept(within_capacity(routing, experts, *options_.capacity), pass);
  });
  if (options_.capacity->pad) {
    routing.capacity = expert_capacity(routing.choices.size(0), routing.choices.size(1), experts,
                                       options_.capacity->factor);
    routing.padding = padding_to_capacity(routing, experts, routing.capacity);
  }
  routing.weights = routing.weights.masked_fill(routing.kept.logical_not(), 0);
}

at::Tensor Router::replayed_kept(const at::Tensor& kept, const ForwardContext& pass) const {
  const RoutingReplay* replay = pass.routing;
  if (replay == nullptr || replay->only_experts) return kept;
  const TokenPositions rows = row_positions(pass);
  if (replay->imposed != nullptr)
    return replay->imposed->find(layer_number_, rows, pass.layer_use, RowDecision::kKept)
        .to(at::kBool);
  if (replay->record != nullptr && !pass.discarded)
    replay->record->record(layer_number_, rows, kept.to(at::kInt), pass.layer_use,
                           RowDecision::kKept);
  return kept;
}

void Router::count(const Routing& routing, const ForwardContext& pass) {
  const at::NoGradGuard no_grad;
  const at::Tensor sums = step_counts();
  if (pass.discarded || (pass.tape != nullptr && pass.tape->runs_again())) return;
  if (!divides_rows_ && tp_.rank() > 0) return;  // the rows of tensor rank 0
  const int64_t b = row_positions(pass).sample.numel();
  at::Tensor padding = pass.tokens.padding_rows(pass.first_row, routing.choices.size(0) / b);
  if (padding.defined()) padding = padding.reshape({-1});
  add_assignments(routing.choices, routing.kept, padding, sums.view({1, -1}));
}

at::Tensor Router::step_counts() {
  if (!step_counts_.defined())
    step_counts_ = at::zeros({options_.num_experts},
                             at::TensorOptions().dtype(at::kInt).device(weight_.value.device()));
  return step_counts_;
}

void Router::step_ended(const at::Tensor& skipped) {
  ++steps_;
  balance_.step_ended();
  const at::Tensor counts = step_counts();
  if (expert_bias_.defined() && weight_.trainable)
    update_expert_bias(expert_bias_, counts, options_.bias_update_rate, skipped);
  counts.zero_();
}

}  // namespace megatron
