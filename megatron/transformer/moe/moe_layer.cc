#include "megatron/transformer/moe/moe_layer.h"

#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/attention_sublayer.h"
#include "megatron/transformer/config/norm_placement.h"
#include "megatron/transformer/moe/router_product.h"

namespace megatron {

RoutingOptions routing_options(const TransformerConfig& c) {
  RoutingOptions options;
  options.topk = c.moe_router_topk;
  options.score = c.moe_router_score_function;
  options.pre_softmax = c.moe_router_pre_softmax;
  options.scaling_factor = c.moe_router_topk_scaling_factor.value_or(0.0);
  options.num_groups = c.moe_router_num_groups.value_or(0);
  options.group_topk = c.moe_router_group_topk.value_or(0);
  options.group_score = c.moe_router_group_score;
  return options;
}

namespace {

BalanceOptions balance_options(const MoEConfig& c) {
  return {c.balance_coefficient("aux_loss"), c.balance_coefficient("seq_aux_loss"),
          c.balance_coefficient("global_aux_loss"), c.moe_z_loss_coeff.value_or(0.0),
          c.moe_per_layer_logging};
}

RouterOptions router_options(const TransformerConfig& c, bool sequence_parallel) {
  RouterOptions options;
  options.hidden_size = c.hidden_size;
  options.num_experts = c.num_experts;
  options.routing = routing_options(c);
  options.sinkhorn = c.uses_sinkhorn();
  options.fp64 = c.moe_router_dtype == MoERouterDtype::kFp64;
  options.add_bias = c.add_bias_linear;
  options.init = c.weight_init(c.num_experts, c.hidden_size);
  options.expert_bias = c.moe_router_enable_expert_bias;
  options.bias_update_rate = c.moe_router_bias_update_rate;
  options.balance = balance_options(c);
  if (c.moe_expert_capacity_factor)
    options.capacity = {*c.moe_expert_capacity_factor, c.moe_token_drop_policy,
                        c.moe_pad_expert_input_to_capacity};
  options.jitter = c.moe_input_jitter_eps.value_or(0.0);
  options.forced = {c.moe_router_force_load_balancing, c.moe_router_force_biased.value_or(0.0)};
  options.seed = c.seed;
  options.sequence_parallel = sequence_parallel;
  return options;
}

RoutedExpertsOptions experts_options(const TransformerConfig& c, int64_t layer_number) {
  RoutedExpertsOptions options;
  const int64_t ffn = c.expert_ffn_size(c), width = c.moe_latent_size.value_or(c.hidden_size);
  options.mlp.num_experts = c.num_experts;
  options.mlp.input_size = width;
  options.mlp.ffn_size = ffn;
  options.mlp.activation = {c.activation(), c.glu_linear_offset, c.activation_func_clamp_value};
  options.mlp.bias = c.add_bias_linear;
  options.mlp.fc1_init = c.weight_init(ffn * (is_gated(c.activation()) ? 2 : 1), width);
  options.mlp.fc2_init = c.weight_init(width, ffn, /*output=*/true);
  options.mlp.recompute_activation = c.recomputes("moe_act");
  options.mlp.quantization = c.quantization(layer_number);
  options.dispatcher = c.moe_token_dispatcher_type;
  options.rank_capacity_factor = c.moe_expert_rank_capacity_factor.value_or(0.0);
  options.weights_on_input = c.moe_apply_probs_on_input;
  options.exchange_early = c.moe_shared_expert_overlap;
  options.offloads = [&c](std::string_view module) { return c.offloads(module); };
  return options;
}

std::unique_ptr<ColumnParallelLinear> latent_projection(const TransformerConfig& c,
                                                        int64_t layer_number, bool output,
                                                        bool sequence_parallel,
                                                        const ParallelGroups& groups) {
  const int64_t rows = output ? c.hidden_size : *c.moe_latent_size,
                columns = output ? *c.moe_latent_size : c.hidden_size;
  LinearOptions options;
  options.bias = false;
  options.init = c.weight_init(rows, columns, output);
  options.sequence_parallel = sequence_parallel;
  options.divided = false;
  options.quantization = c.quantization(layer_number);
  return std::make_unique<ColumnParallelLinear>(output ? "fc2_latent_proj" : "fc1_latent_proj",
                                                columns, rows, options, groups);
}

}  // namespace

TransformerConfig shared_experts_config(TransformerConfig config) {
  if (config.recomputes("shared_experts")) config.recompute_modules.push_back("mlp_act");
  config.norm_placement = NormPlacement::kPost;
  config.ffn_hidden_size = *config.moe_shared_expert_intermediate_size;
  return config;
}

class MoELayer::SharedExperts : public Module {
 public:
  SharedExperts(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                const ParallelGroups& groups)
      : config_(shared_experts_config(config)),
        mlp_(config_, layer_number, sequence_parallel, groups,
             {.input = "expert_fc1", .recompute_fc1 = config.recomputes("shared_experts")}) {
    mlp_.visit([this](const std::string& name, Parameter& parameter) { add(name, &parameter); });
    if (!config.moe_shared_expert_gate) return;
    gate_.local_shape = gate_.global_shape = {1, config.hidden_size};
    gate_.init = config.weight_init(1, config.hidden_size);
    if (sequence_parallel && groups.tp.size() > 1)
      gate_.placement.partial_grad.insert(Axis::kTensor);
    add("gate_weight", &gate_);
  }

  at::Tensor forward(const at::Tensor& x, const LayerContext& context) {
    const at::Tensor y = mlp_.forward(x, context, /*add=*/false).output;
    if (gate_.local_shape.empty()) return y;
    const at::Tensor logits = router_logits(x, gate_, /*bias=*/nullptr, accumulate_type(x));
    return y * logits.sigmoid().to(y.scalar_type()).view({x.size(0), x.size(1), 1});
  }

 private:
  const TransformerConfig config_;
  MLP mlp_;
  Parameter gate_;
};

std::vector<std::string> moe_losses(const TransformerConfig& config, int64_t layer_number) {
  const BalanceOptions options = balance_options(config);
  std::vector<std::string> names;
  for (const std::string_view name : balance_loss_names(options)) names.emplace_back(name);
  if (!options.per_layer) return names;
  for (std::string& name : layer_loss_names(options, layer_number))
    names.push_back(std::move(name));
  return names;
}

MoELayer::MoELayer(const TransformerConfig& config, int64_t layer_number, bool sequence_parallel,
                   const ParallelGroups& groups)
    : config_(config),
      tp_(groups.tp),
      same_rows_(!sequence_parallel && groups.tp.size() > 1),
      latent_size_(config.moe_latent_size.value_or(config.hidden_size)),
      router_(router_options(config, sequence_parallel), layer_number, groups),
      experts_(experts_options(config, layer_number), groups) {
  if (norms_inputs(config)) {
    NormOptions norm = norm_options(config);
    norm.partial_over_tensor = sequence_parallel;
    norm_ = std::make_unique<Norm>(config.hidden_size, norm);
  }
  add("router", &router_);
  if (config.moe_latent_size) {
    fc1_latent_proj_ = latent_projection(config, layer_number, false, sequence_parallel, groups);
    fc2_latent_proj_ = latent_projection(config, layer_number, true, sequence_parallel, groups);
    add("fc1_latent_proj", fc1_latent_proj_.get());
    add("fc2_latent_proj", fc2_latent_proj_.get());
  }
  add("experts", &experts_);
  if (!config.moe_shared_expert_intermediate_size) return;
  shared_experts_ =
      std::make_unique<SharedExperts>(config, layer_number, sequence_parallel, groups);
  add("shared_experts", shared_experts_.get());
}

MoELayer::~MoELayer() = default;

at::Tensor MoELayer::normed_of(const at::Tensor& x) {
  return (norm_ != nullptr ? norm_->forward(x) : x).to(router_.weight().value.scalar_type());
}

SublayerOutput MoELayer::forward(const at::Tensor& x, const LayerContext& context, bool add) {
  OffloadedPass* offload = context.offload();
  at::Tensor normed;
  std::optional<SavedTensorScope> saves_no_norm;
  {
    const OffloadScope scope(offload,
                             [this](const at::Tensor&) { return config_.offloads("mlp_norm"); });
    normed = normed_of(x);
    if (norm_ && config_.recomputes("layernorm"))
      saves_no_norm.emplace(/*recomputing=*/true, keep_normed(x, normed));
  }
  const OffloadScope scope(offload, [&](const at::Tensor& saved) {
    return config_.offloads(is_alias(saved, normed) ? "expert_fc1" : "moe_router");
  });
  const Routing routing = router_.forward(normed, context);
  const at::Tensor input = fc1_latent_proj_ ? fc1_latent_proj_->forward(normed) : normed;
  const at::Tensor rows = input.reshape({-1, latent_size_});
  RoutedExperts::Pass pass;
  if (!same_rows_) pass = experts_.begin(rows, routing);
  at::Tensor shared = shared_experts_ ? shared_experts_->forward(normed, context) : at::Tensor();
  // What the sum over a token's experts starts with: one rounding for both.
  at::Tensor base = shared_experts_ ? shared : add ? x : at::Tensor();
  if (same_rows_ || fc2_latent_proj_ ||
      (base.defined() && base.scalar_type() != rows.scalar_type()))
    base.reset();
  at::Tensor y = same_rows_ ? of_own_rows(rows, routing)
                            : experts_.end(std::move(pass),
                                           base.defined() ? base.reshape_as(rows) : base, offload);
  y = y.view(input.sizes());
  if (fc2_latent_proj_) y = fc2_latent_proj_->forward(y);
  if (shared.defined() && !base.defined()) y = y + shared;
  const bool has_residual = base.is_same(x);
  base.reset();
  shared.reset();
  if (!add) return {y, x};
  return {has_residual ? y : x + y, {}};
}

// Computes the normed input again in place of keeping it.
SavedTensorScope::Keep MoELayer::keep_normed(const at::Tensor& x, const at::Tensor& normed) {
  const SavedTensorScope::Restore again =
      recomputed([this, x = keep_saved(x)] { return normed_of(x()); });
  return [again, normed = normed.detach()](const at::Tensor& saved) -> SavedTensorScope::Restore {
    if (!is_alias(saved, normed)) return {};
    return [again, shape = saved.sizes().vec()] { return again().view(shape); };
  };
}

// Where tensor ranks have the same rows, each takes its part of them to the experts.
at::Tensor MoELayer::of_own_rows(const at::Tensor& rows, const Routing& routing) {
  MEGATRON_CHECK(!at::GradMode::is_enabled() || !rows.requires_grad(),
                 "experts with several tensor-parallel ranks are trained with --sequence-parallel");
  const int64_t n = rows.size(0), begin = n * tp_.rank() / tp_.size(),
                end = n * (tp_.rank() + 1) / tp_.size();
  const auto own = [&](const at::Tensor& all) {
    return all.defined() ? all.slice(0, begin, end) : all;
  };
  // Padding fills experts up to a capacity of all rows, of which here are some.
  const Routing part{own(routing.choices), own(routing.weights), own(routing.kept), {}};
  const at::Tensor y = at::zeros_like(rows);
  y.slice(0, begin, end).copy_(experts_.forward(own(rows), part));
  tp_.all_reduce(y)->wait();
  return y;
}

}  // namespace megatron
