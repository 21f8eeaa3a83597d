#include "megatron/models/common/multi_token_prediction.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "megatron/transformer/layer/sublayer.h"
#include "megatron/transformer/layer_kinds.h"

namespace megatron {
namespace {

LinearOptions projection_options(const TransformerConfig& config, bool sequence_parallel) {
  LinearOptions options;
  options.bias = false;
  options.init = config.weight_init(config.hidden_size, 2 * config.hidden_size);
  options.sequence_parallel = sequence_parallel;
  return options;
}

// A coefficient of a loss of routers: a repeated layer adds it once for each depth.
void divide_router_losses(TransformerConfig& config, int64_t uses) {
  for (double& coefficient : config.moe_aux_loss_coeff) coefficient /= static_cast<double>(uses);
  if (config.moe_z_loss_coeff) *config.moe_z_loss_coeff /= static_cast<double>(uses);
}

std::string loss_name(int64_t depth) { return cat("mtp_", depth, " loss"); }
std::string acceptance_name(int64_t depth) { return cat("mtp_", depth, "_acceptance_rate"); }

}  // namespace

TransformerConfig depth_layer_config(const TransformerConfig& config) {
  const int64_t last = config.num_layers;
  TransformerConfig own = config;
  own.layer_pattern = config.LayerConfig::layer_letters(last);
  own.moe_layer_freq = "1";
  if (!config.is_moe_layer(last)) own.num_experts = 0;
  own.window_size = config.window(last);
  own.window_attn_skip_freq.clear();
  if (own.window_size.empty()) own.rotary_base_local.reset();
  if (own.cp_comm_type.size() > 1) own.cp_comm_type = {config.cp_comm_type.back()};
  if (!config.quantization(last).enabled()) own.remove_quantization();
  own.first_last_layers_bf16 = false;
  std::erase(own.recompute_modules, "mlp");
  std::erase(own.recompute_modules, "moe");
  own.offload_modules.clear();
  divide_router_losses(own, config.mtp_num_layers / config.mtp_distinct_layers());
  return own;
}

bool recomputes_depths(const TransformerConfig& config) {
  return config.recompute_granularity == RecomputeGranularity::kFull &&
         config.recompute_method == RecomputeMethod::kUniform;
}

MultiTokenLayer::MultiTokenLayer(const ModelConfig& config, int64_t depth,
                                 const ParallelGroups& groups)
    : config_(depth_layer_config(config.transformer)),
      tp_(groups.tp),
      sequence_parallel_(config.sequence_parallel),
      enorm_(config_.hidden_size, norm_options(config_, sequence_parallel_)),
      hnorm_(config_.hidden_size, norm_options(config_, sequence_parallel_)),
      eh_proj_("eh_proj", 2 * config_.hidden_size, config_.hidden_size,
               projection_options(config_, sequence_parallel_), groups),
      transformer_layer_(
          make_layer(config_, config_.num_layers + depth, sequence_parallel_, groups)),
      final_layernorm_(config_.hidden_size, norm_options(config_, sequence_parallel_)) {
  add("enorm", &enorm_);
  add("hnorm", &hnorm_);
  add("eh_proj", &eh_proj_);
  add("transformer_layer", transformer_layer_.get());
  add("final_layernorm", &final_layernorm_);
}

at::Tensor MultiTokenLayer::forward(at::Tensor embedded, const at::Tensor& hidden,
                                    const LayerContext& context) {
  at::Tensor x = eh_proj_.forward(at::cat({enorm_.forward(embedded), hnorm_.forward(hidden)}, -1));
  embedded.reset();
  x = gather_from_tensor_model_parallel_region(x, tp_);
  // A copy, so that the rows of other ranks are freed
  if (sequence_parallel_) x = scatter_to_sequence_parallel_region(x, tp_).clone();
  x = transformer_layer_->forward(x, context);
  return final_layernorm_.forward(x);
}

MultiTokenPrediction::MultiTokenPrediction(const ModelConfig& config, const ParallelGroups& groups,
                                           MultiTokenEnds ends)
    : config_(config.transformer), cp_(groups.cp), rotary_(config_), ends_(std::move(ends)) {
  for (int64_t i = 0; i < config_.mtp_distinct_layers(); ++i) {
    layers_.push_back(std::make_unique<MultiTokenLayer>(config, i + 1, groups));
    add(cat("layers.", i), layers_.back().get());
  }
  const int64_t uses = config_.mtp_num_layers / config_.mtp_distinct_layers();
  for (Parameter* parameter : parameters()) parameter->uses = static_cast<int>(uses);
}

std::vector<std::string> MultiTokenPrediction::loss_names(const TransformerConfig& config) {
  std::vector<std::string> names;
  for (int64_t depth = 1; depth <= config.mtp_num_layers; ++depth) {
    names.push_back(loss_name(depth));
    names.push_back(acceptance_name(depth));
  }
  return names;
}

// Note [Depths are not cut] The main loss reads the decoder's output next to the depths. A cut of
// the tape in a depth's layer would part the gradients of the two: so the layers make none, and
// what is recomputed is a whole depth with its loss, through which the decoder's output passes.
// From the second depth on, it travels together with the depth's own input.
at::Tensor MultiTokenPrediction::forward(const at::Tensor& hidden, const Batch& batch,
                                         const ForwardContext& context) {
  const ShiftedBatch shifted(batch, context.cp != nullptr ? *context.cp : cp_);
  ForwardContext pass = context;
  pass.offload = nullptr;
  LayerRotary rotary;
  if (config_.position_embedding_type == PositionEmbedding::kRope)
    rotary = rotary_.tables(pass.position_ids.defined() ? pass.position_ids : pass.place.position,
                            hidden.scalar_type());
  const bool recomputed = recomputes_depths(config_) && context.tape != nullptr;
  at::Tensor x = hidden, own = hidden;
  for (int64_t depth = 1; depth <= config_.mtp_num_layers; ++depth) {
    const ShiftedColumns columns = shifted.at(depth);
    if (!recomputed) {
      own = run_depth(depth, own, columns, pass, rotary);
      continue;
    }
    x = context.tape->run(
        [this, depth, columns, pass, rotary](const at::Tensor& in) {
          const bool first = depth == 1, last = depth == config_.mtp_num_layers;
          const at::Tensor main = first ? in : in[0];
          const at::Tensor out = run_depth(depth, first ? in : in[1], columns, pass, rotary);
          return last ? main : at::stack({main, out});
        },
        x);
  }
  return x;
}

at::Tensor MultiTokenPrediction::run_depth(int64_t depth, const at::Tensor& hidden,
                                           const ShiftedColumns& columns,
                                           const ForwardContext& pass, const LayerRotary& rotary) {
  ForwardContext shifted = pass, own = pass;
  shifted.position_ids = columns.position_ids;
  own.tokens.padding = columns.padding;
  own.layer_use = depth;
  const at::Tensor out = layer(depth).forward(ends_.embed(columns.tokens, shifted, depth), hidden,
                                              LayerContext{own, rotary});
  add_loss(depth, out, columns, pass);
  return out;
}

void MultiTokenPrediction::add_loss(int64_t depth, const at::Tensor& hidden,
                                    const ShiftedColumns& columns, const ForwardContext& pass) {
  AuxiliaryLosses& losses = *pass.auxiliary_losses;
  const at::ScalarType type = hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const double factor =
      config_.mtp_loss_scaling_factor / static_cast<double>(config_.mtp_num_layers);
  const at::Tensor mask = columns.loss_mask.t().to(type), weight = mask.sum();
  const at::Tensor weights =
      losses.per_token() ? mask * (factor * columns.weight_ratio).to(type) : mask * factor;
  at::Tensor hits;
  const at::Tensor per_token = ends_.token_losses(hidden, columns.labels, weights, pass, &hits);
  losses.train((per_token * weights).sum(), weight, LossRows::kAll);
  losses.log(loss_name(depth), (per_token.detach() * mask).sum(), weight, LossRows::kAll);
  losses.log(acceptance_name(depth), 100 * (hits * mask).sum(), weight, LossRows::kAll);
}

}  // namespace megatron
