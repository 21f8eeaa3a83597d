#include "megatron/transformer/config/moe/moe.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/detail/given_flags.h"
#include "megatron/transformer/config/detail/layer_list.h"

namespace megatron {
namespace {

constexpr std::string_view kScoreFunctions[] = {"softmax", "sigmoid", "sqrtsoftplus"};
constexpr std::string_view kGroupScores[] = {"sum", "max"};
constexpr std::string_view kRouterDtypes[] = {"fp32", "fp64"};
constexpr std::string_view kDropPolicies[] = {"probs", "position"};
constexpr std::string_view kBalanceLosses[] = {"aux_loss", "seq_aux_loss", "global_aux_loss"};

bool is_loss(std::string_view type) {
  return std::find(std::begin(kBalanceLosses), std::end(kBalanceLosses), type) !=
         std::end(kBalanceLosses);
}

bool has_losses(const MoEConfig& c) {
  return c.moe_z_loss_coeff ||
         std::any_of(std::begin(kBalanceLosses), std::end(kBalanceLosses),
                     [&](std::string_view type) { return c.balance_coefficient(type) != 0; });
}

void validate_groups(const MoEConfig& c, Violations& v) {
  const bool groups = c.moe_router_num_groups.has_value();
  v.require(groups == c.moe_router_group_topk.has_value(),
            "--moe-router-num-groups and --moe-router-group-topk are given together or not at all");
  v.require(groups || c.moe_router_group_score == GroupScore::kSum,
            "--moe-router-group-score has an effect only with --moe-router-num-groups");
  if (!groups || !c.moe_router_group_topk) return;
  const int64_t n = *c.moe_router_num_groups, kept = *c.moe_router_group_topk;
  if (n < 1 || c.num_experts % n != 0) {
    v.add(cat("--num-experts ", c.num_experts, " is not divisible by --moe-router-num-groups ", n),
          cat("groups that divide it: ", format_divisors(c.num_experts)));
    return;
  }
  v.require(kept >= 1 && kept <= n,
            cat("--moe-router-group-topk ", kept, ": expected 1 to --moe-router-num-groups ", n));
  v.require(c.moe_router_topk <= kept * (c.num_experts / n),
            cat("--moe-router-topk ", c.moe_router_topk, " exceeds the experts of ", kept,
                " groups, ", kept * (c.num_experts / n)));
  v.require(c.moe_router_group_score == GroupScore::kMax || c.moe_router_topk >= kept,
            cat("--moe-router-topk ", c.moe_router_topk, " is below --moe-router-group-topk ", kept,
                ": a group has no best scores to sum"),
            "--moe-router-group-score max");
}

void validate_balance(const MoEConfig& c, Violations& v) {
  const auto& types = c.moe_router_load_balancing_type;
  v.require(types.size() == c.moe_aux_loss_coeff.size(),
            cat("--moe-router-load-balancing-type has ", types.size(),
                " values and --moe-aux-loss-coeff ", c.moe_aux_loss_coeff.size()),
            "as many coefficients as types, 0 for sinkhorn and none");
  const MoEConfig defaults;
  for (size_t i = 0; i < types.size(); ++i) {
    const std::string& type = types[i];
    const bool alone = type == "sinkhorn" || type == "none";
    v.require(alone || is_loss(type), cat("--moe-router-load-balancing-type ", type, " is unknown"),
              "aux_loss, seq_aux_loss, global_aux_loss, sinkhorn, none");
    v.require(std::count(types.begin(), types.end(), type) == 1,
              cat("--moe-router-load-balancing-type ", type, " is given twice"));
    v.require(!alone || types.size() == 1,
              cat("--moe-router-load-balancing-type ", type, " stands alone"));
    if (i >= c.moe_aux_loss_coeff.size()) continue;
    const double coefficient = c.moe_aux_loss_coeff[i];
    v.require(coefficient >= 0, cat("--moe-aux-loss-coeff ", coefficient, " is negative"));
    v.require(!alone || coefficient == 0,
              cat("--moe-aux-loss-coeff ", coefficient, " has no effect with ", type));
    v.require(
        !is_loss(type) || coefficient != 0 || types == defaults.moe_router_load_balancing_type,
        cat("--moe-router-load-balancing-type ", type,
            " has no effect with --moe-aux-loss-coeff 0"),
        "a positive coefficient, or none");
  }
  v.require(c.moe_z_loss_coeff.value_or(1) > 0,
            cat("--moe-z-loss-coeff ", c.moe_z_loss_coeff.value_or(0), " must be positive"),
            "leave it out for no z-loss");
  v.require(!c.moe_per_layer_logging || has_losses(c),
            "--moe-per-layer-logging has no effect without a loss of routers",
            "--moe-aux-loss-coeff or --moe-z-loss-coeff");
  if (!c.uses_sinkhorn()) return;
  const bool plain = c.moe_router_score_function == RouterScore::kSoftmax &&
                     !c.moe_router_pre_softmax && !c.moe_router_num_groups &&
                     !c.moe_router_topk_scaling_factor && !c.moe_z_loss_coeff &&
                     !c.moe_expert_capacity_factor;
  v.require(plain,
            "--moe-router-load-balancing-type sinkhorn has its own choice and weights: not with "
            "another score function, --moe-router-pre-softmax, scaling, groups, a z-loss or a "
            "capacity");
}

void validate_router(const MoEConfig& c, Violations& v) {
  v.require(c.moe_router_topk >= 1 && c.moe_router_topk <= c.num_experts,
            cat("--moe-router-topk ", c.moe_router_topk, ": expected 1 to --num-experts ",
                c.num_experts));
  const bool softmax = c.moe_router_score_function == RouterScore::kSoftmax;
  v.require(!c.moe_router_pre_softmax || softmax,
            "--moe-router-pre-softmax has an effect only with --moe-router-score-function softmax");
  v.require(c.moe_router_topk != 1 || !softmax || c.moe_router_pre_softmax || c.uses_sinkhorn(),
            "--moe-router-topk 1 with a softmax over the chosen expert gives it the weight 1 "
            "whatever the router says, which then learns nothing",
            "--moe-router-pre-softmax, or --moe-router-score-function sigmoid");
  v.require(!c.moe_router_enable_expert_bias || !softmax,
            "--moe-router-enable-expert-bias needs scores that do not depend on each other",
            "--moe-router-score-function sigmoid or sqrtsoftplus");
  v.require(c.moe_router_enable_expert_bias || c.moe_router_bias_update_rate == 1e-3,
            "--moe-router-bias-update-rate has an effect only with "
            "--moe-router-enable-expert-bias");
  v.require(c.moe_router_topk_scaling_factor.value_or(1) > 0,
            cat("--moe-router-topk-scaling-factor ", c.moe_router_topk_scaling_factor.value_or(0),
                " must be positive"));
  const double jitter = c.moe_input_jitter_eps.value_or(0.01);
  v.require(jitter > 0 && jitter < 1, cat("--moe-input-jitter-eps ", jitter, " is outside (0, 1)"));
  v.require(!c.moe_router_force_biased || c.moe_router_force_load_balancing,
            "--moe-router-force-biased needs --moe-router-force-load-balancing");
  v.require(!c.moe_apply_probs_on_input || c.moe_router_topk == 1,
            "--moe-apply-probs-on-input needs --moe-router-topk 1");
}

void validate_sizes(const MoEConfig& c, Violations& v, const ShapeConfig& shape) {
  const auto positive = [&](const char* flag, std::optional<int64_t> value) {
    v.require(value.value_or(1) > 0, cat(flag, " ", value.value_or(0), " must be positive"));
  };
  positive("--moe-ffn-hidden-size", c.moe_ffn_hidden_size);
  positive("--moe-shared-expert-intermediate-size", c.moe_shared_expert_intermediate_size);
  positive("--moe-latent-size", c.moe_latent_size);
  v.require(!c.moe_shared_expert_gate || c.moe_shared_expert_intermediate_size,
            "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size");
  const auto list = parse_layer_list(c.moe_layer_freq);
  const bool fits =
      list && static_cast<int64_t>(list->size()) == shape.num_layers &&
      std::all_of(list->begin(), list->end(), [](int64_t e) { return e == 0 || e == 1; }) &&
      std::find(list->begin(), list->end(), 1) != list->end();
  v.require(
      parse_layer_period(c.moe_layer_freq) || fits,
      cat("--moe-layer-freq ", c.moe_layer_freq, ": expected a positive integer, or a list of ",
          shape.num_layers, " zeros and ones with a one, such as ([0]+[1]*2)*2"));
}

void validate_capacity(const MoEConfig& c, Violations& v) {
  v.require(c.moe_expert_capacity_factor.value_or(1) > 0,
            cat("--moe-expert-capacity-factor ", c.moe_expert_capacity_factor.value_or(0),
                " must be positive"),
            "leave it out to drop no token");
  v.require(c.moe_expert_capacity_factor || c.moe_token_drop_policy == DropPolicy::kProbs,
            "--moe-token-drop-policy has an effect only with --moe-expert-capacity-factor");
  v.require(c.moe_expert_capacity_factor || !c.moe_pad_expert_input_to_capacity,
            "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor");
}

}  // namespace

void MoEConfig::fields(FieldVisitor& v) {
  architecture_fields(v);
  training_fields(v);
}

void MoEConfig::architecture_fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("mixture of experts");
  v.field("num_experts", num_experts, "experts of a layer; 0: an MLP in their place");
  v.field("moe_layer_freq", moe_layer_freq,
          "n: every n-th layer from the first has experts; or a list with 1 for such layers, as "
          "([0]+[1]*2)*2");
  v.field("moe_ffn_hidden_size", moe_ffn_hidden_size,
          "width of one expert; default: --ffn-hidden-size");
  v.field("moe_router_topk", moe_router_topk, "experts of a token");
  v.choice("moe_router_score_function", moe_router_score_function, kScoreFunctions,
           "scores of the router's logits");
  v.field("moe_router_pre_softmax", moe_router_pre_softmax,
          "softmax over all experts before the choice, not over the chosen ones");
  v.field("moe_router_topk_scaling_factor", moe_router_topk_scaling_factor,
          "multiplies the weights of the chosen experts");
  v.field("moe_router_num_groups", moe_router_num_groups,
          "experts in that many equal runs, of which a token uses --moe-router-group-topk");
  v.field("moe_router_group_topk", moe_router_group_topk, "groups of experts that a token may use");
  v.choice("moe_router_group_score", moe_router_group_score, kGroupScores,
           "what ranks groups: the sum of their best scores, or the highest (DeepSeek-V2)");
  v.field("moe_router_enable_expert_bias", moe_router_enable_expert_bias,
          "balance by a bias that is added to the scores for the choice alone");
  v.field("moe_shared_expert_intermediate_size", moe_shared_expert_intermediate_size,
          "width of the expert that every token uses, all shared experts together");
  v.field("moe_shared_expert_gate", moe_shared_expert_gate,
          "multiply the shared expert's output by a sigmoid of its input");
  v.field("moe_latent_size", moe_latent_size,
          "width to which tokens are projected before the experts, and from which after them");
  v.field("moe_apply_probs_on_input", moe_apply_probs_on_input,
          "with one expert per token: its weight multiplies its input");
}

void MoEConfig::training_fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.choice("moe_router_dtype", moe_router_dtype, kRouterDtypes,
           "type of logits and scores; fp64 for models in fp64");
  v.field("moe_router_load_balancing_type", moe_router_load_balancing_type,
          "losses that balance the experts: aux_loss (over a micro-batch), seq_aux_loss, "
          "global_aux_loss, several of them; or sinkhorn; or none");
  v.field("moe_aux_loss_coeff", moe_aux_loss_coeff, "coefficients of these losses");
  v.field("moe_z_loss_coeff", moe_z_loss_coeff,
          "coefficient of the squared log of the sum of the router's exponentials");
  v.field("moe_router_bias_update_rate", moe_router_bias_update_rate,
          "change of the expert bias per step");
  v.field("moe_input_jitter_eps", moe_input_jitter_eps,
          "in training, multiply the router's input by uniform numbers in 1 +- this");
  v.field("moe_router_force_load_balancing", moe_router_force_load_balancing,
          "for benchmarks: random logits");
  v.field(
      "moe_router_force_biased", moe_router_force_biased,
      "with --moe-router-force-load-balancing: standard deviation of a random number per expert "
      "that is added; negative: drawn once per layer");
  v.field("moe_expert_capacity_factor", moe_expert_capacity_factor,
          "drop choices beyond this multiple of a balanced share of a rank's tokens");
  v.choice("moe_token_drop_policy", moe_token_drop_policy, kDropPolicies,
           "which choices stay: those of the highest weights, or the first");
  v.role(FieldRole::kMachine);
  v.field("moe_pad_expert_input_to_capacity", moe_pad_expert_input_to_capacity,
          "fill every expert's rows of a rank up to --moe-expert-capacity-factor with rows of "
          "weight 0: the same number in every step");
  v.field("moe_per_layer_logging", moe_per_layer_logging,
          "log the losses of routers of each layer, too, as moe/<name>_layer_<i>");
}

void MoEConfig::validate(Violations& v, const ShapeConfig& shape) const {
  if (num_experts == 0) {
    for (const std::string& flag : given_flags(*this))
      v.add(cat(flag, " has no effect without --num-experts"));
    return;
  }
  if (num_experts < 0) {
    v.add(cat("--num-experts ", num_experts, " is negative"), "0: no experts");
    return;
  }
  validate_sizes(*this, v, shape);
  validate_router(*this, v);
  validate_groups(*this, v);
  validate_balance(*this, v);
  validate_capacity(*this, v);
}

bool MoEConfig::is_moe_layer(int64_t layer_number) const {
  if (!has_moe()) return false;
  if (const auto list = parse_layer_list(moe_layer_freq)) {
    const auto place = static_cast<size_t>(layer_number - 1);
    return place < list->size() && (*list)[place] != 0;
  }
  const auto period = parse_layer_period(moe_layer_freq);
  return (layer_number - 1) % period.value_or(1) == 0;
}

int64_t MoEConfig::num_moe_layers(int64_t num_layers) const {
  int64_t count = 0;
  for (int64_t layer = 1; layer <= num_layers; ++layer) count += is_moe_layer(layer);
  return count;
}

double MoEConfig::balance_coefficient(std::string_view type) const {
  for (size_t i = 0; i < moe_router_load_balancing_type.size(); ++i)
    if (moe_router_load_balancing_type[i] == type && i < moe_aux_loss_coeff.size())
      return moe_aux_loss_coeff[i];
  return 0;
}

bool MoEConfig::uses_sinkhorn() const {
  return moe_router_load_balancing_type == std::vector<std::string>{"sinkhorn"};
}

}  // namespace megatron
