#include "megatron/optimizer/optimizer_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/optimizer/update_rules.h"

namespace megatron {
namespace {

using Spellings = std::string_view;
constexpr std::array<Spellings, 5> kLrDecayStyles = {"constant", "linear", "cosine",
                                                     "inverse-square-root", "WSD"};
constexpr std::array<Spellings, 4> kWsdDecayStyles = {"exponential", "linear", "cosine",
                                                      "minus_sqrt"};
constexpr std::array<Spellings, 3> kIncrSpellings = {"constant", "linear", "cosine"};
constexpr std::array<Spellings, 2> kStateTypes = {"fp32", "bf16"};
constexpr std::array<Spellings, 1> kGradTypes = {"fp32"};

void visit_learning_rate(OptimizerConfig& config, FieldVisitor& visitor) {
  visitor.group("learning rate");
  visitor.field("lr", config.lr, "peak learning rate");
  visitor.field("min_lr", config.min_lr, "learning rate at the end of the decay and after it");
  visitor.choice("lr_decay_style", config.lr_decay_style, kLrDecayStyles,
                 "shape of the decay after warm-up");
  visitor.field("lr_decay_iters", config.lr_decay_iters,
                "iterations until min-lr is reached; default: the length of training");
  visitor.field("lr_decay_samples", config.lr_decay_samples,
                "samples until min-lr is reached; default: the length of training");
  visitor.field("lr_warmup_fraction", config.lr_warmup_fraction,
                "part of the decay steps that is spent on linear warm-up");
  visitor.field("lr_warmup_iters", config.lr_warmup_iters, "iterations of linear warm-up");
  visitor.field("lr_warmup_samples", config.lr_warmup_samples, "samples of linear warm-up");
  visitor.field("lr_warmup_init", config.lr_warmup_init, "learning rate at which warm-up starts");
  visitor.choice("lr_wsd_decay_style", config.lr_wsd_decay_style, kWsdDecayStyles,
                 "shape of the tail of the WSD style");
  visitor.field("lr_wsd_decay_iters", config.lr_wsd_decay_iters,
                "iterations of the tail of the WSD style");
  visitor.field("lr_wsd_decay_samples", config.lr_wsd_decay_samples,
                "samples of the tail of the WSD style");
  visitor.field("decoupled_lr", config.decoupled_lr,
                "peak learning rate of the embedding and of the output layer; default: lr");
  visitor.field("decoupled_min_lr", config.decoupled_min_lr,
                "min-lr of the embedding and of the output layer; default: min-lr");
  visitor.field({"override_opt_param_scheduler",
                 "--override-opt-param-scheduler --override-opt_param-scheduler"},
                config.override_opt_param_scheduler,
                "on resume, take the schedule of the flags where it differs from the checkpoint's");
  visitor.field({"use_checkpoint_opt_param_scheduler",
                 "--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler"},
                config.use_checkpoint_opt_param_scheduler,
                "on resume, take the schedule of the checkpoint where it differs from the flags'");
}

// The name of a rule, as a choice among those of the table.
void visit_rule(std::string& name, FieldVisitor& visitor) {
  static const std::vector<Spellings> names = [] {
    std::vector<Spellings> all;
    for (const UpdateRule* rule : update_rules()) all.push_back(rule->name);
    return all;
  }();
  const auto at = std::find(names.begin(), names.end(), name);
  MEGATRON_ASSERT(at != names.end(), "no update rule is called ", name);
  int index = static_cast<int>(at - names.begin());
  visitor.choice("optimizer", index, names, "update rule: AdamW, or SGD with momentum");
  name = names.at(static_cast<size_t>(index));
}

void visit_update(OptimizerConfig& config, FieldVisitor& visitor) {
  visitor.group("optimizer");
  visit_rule(config.optimizer, visitor);
  visitor.field(
      "weight_decay", config.weight_decay,
      "decay of matrices and embeddings; biases and one-dimensional parameters have none");
  visitor.field("start_weight_decay", config.start_weight_decay,
                "weight decay at the start of its ramp");
  visitor.field("end_weight_decay", config.end_weight_decay, "weight decay at the end of its ramp");
  visitor.choice("weight_decay_incr_style", config.weight_decay_incr_style, kIncrSpellings,
                 "shape of the ramp of the weight decay over the run");
  visitor.field("apply_wd_to_qk_layernorm", config.apply_wd_to_qk_layernorm,
                "decay the weights of the query and key norms too");
  visitor.field("adam_beta1", config.adam_beta1, "decay of the average of gradients");
  visitor.field("adam_beta2", config.adam_beta2, "decay of the average of squared gradients");
  visitor.field("adam_eps", config.adam_eps,
                "added to the root of the average of squared gradients");
  visitor.field("sgd_momentum", config.sgd_momentum, "momentum of SGD");
  visitor.field("clip_grad", config.clip_grad,
                "bound of the norm of all gradients together; 0: none");
}

void visit_precision(OptimizerConfig& config, FieldVisitor& visitor) {
  visitor.group("mixed precision");
  visitor.field("fp16", config.fp16, "model in fp16, master weights and gradients in fp32");
  visitor.field("bf16", config.bf16, "model in bf16, master weights and gradients in fp32");
  visitor.field("loss_scale", config.loss_scale,
                "constant loss scale; default: dynamic with fp16, else none");
  visitor.field("initial_loss_scale", config.initial_loss_scale, "dynamic loss scale at the start");
  visitor.field("min_loss_scale", config.min_loss_scale, "lowest dynamic loss scale");
  visitor.field("loss_scale_window", config.loss_scale_window,
                "good steps in a row after which the dynamic loss scale doubles");
  visitor.field("hysteresis", config.hysteresis,
                "bad steps before the dynamic loss scale is halved");
  visitor.field("use_precision_aware_optimizer", config.use_precision_aware_optimizer,
                "keep states of the optimizer in the types that the next flags say");
  visitor.choice("main_params_dtype", config.main_params_dtype, kStateTypes,
                 "master weights; bf16: the weights themselves, with stochastic rounding");
  visitor.choice("main_grads_dtype", config.main_grads_dtype, kGradTypes, "accumulated gradients");
  visitor.choice("exp_avg_dtype", config.exp_avg_dtype, kStateTypes,
                 "average of gradients; bf16: with stochastic rounding");
  visitor.choice("exp_avg_sq_dtype", config.exp_avg_sq_dtype, kStateTypes,
                 "average of squared gradients; bf16: with stochastic rounding");
  visitor.field("optimizer_cpu_offload", config.optimizer_cpu_offload,
                "keep master weights and moments in host memory and update them there");
  visitor.field("optimizer_offload_fraction", config.optimizer_offload_fraction,
                "part of the elements whose states are in host memory with "
                "--optimizer-cpu-offload, at least: whole "
                "parameters are");
  visitor.field({"check_for_nan_in_loss_and_grad", "--no-check-for-nan-in-loss-and-grad", true},
                config.check_for_nan_in_loss_and_grad,
                "apply steps with NaN or infinite gradients instead of skipping them");
  visitor.field("max_consecutive_bad_steps", config.max_consecutive_bad_steps,
                "stop after that many skipped steps in a row that a lower loss scale cannot save");
}

void check_range(const char* flag, double value, bool legal, const char* expected,
                 Violations& violations) {
  if (!legal) violations.add(cat(flag, " is ", value), expected);
}

void validate_learning_rate(const OptimizerConfig& config, Violations& violations) {
  if (config.lr) {  // the run checks whether it is required
    check_range("--lr", *config.lr, *config.lr >= 0, "0 or above", violations);
    if (config.min_lr > *config.lr) {
      violations.add(cat("--min-lr ", config.min_lr, " is above --lr ", *config.lr),
                     "a value up to --lr");
    }
  }
  check_range("--min-lr", config.min_lr, config.min_lr >= 0, "0 or above", violations);
  if (config.decoupled_min_lr && !config.decoupled_lr) {
    violations.add("--decoupled-min-lr is given without --decoupled-lr", "give both or neither");
  }
  if (config.decoupled_lr &&
      config.decoupled_min_lr.value_or(config.min_lr) > *config.decoupled_lr) {
    violations.add(cat("the minimum of the decoupled learning rate, ",
                       config.decoupled_min_lr.value_or(config.min_lr),
                       ", is above --decoupled-lr ", *config.decoupled_lr),
                   "--decoupled-min-lr up to --decoupled-lr");
  }
  if (config.lr_warmup_fraction) {
    const double fraction = *config.lr_warmup_fraction;
    check_range("--lr-warmup-fraction", fraction, fraction >= 0 && fraction < 1,
                "at least 0 and below 1", violations);
    if (config.lr_warmup_iters != 0 || config.lr_warmup_samples != 0) {
      violations.add("--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples",
                     "give one of the three");
    }
  }
  check_range("--lr-warmup-iters", static_cast<double>(config.lr_warmup_iters),
              config.lr_warmup_iters >= 0, "0 or above", violations);
  check_range("--lr-warmup-samples", static_cast<double>(config.lr_warmup_samples),
              config.lr_warmup_samples >= 0, "0 or above", violations);
  if (config.override_opt_param_scheduler && config.use_checkpoint_opt_param_scheduler) {
    violations.add("--override-opt-param-scheduler excludes --use-checkpoint-opt-param-scheduler",
                   "the first takes the flags' schedule, the second the checkpoint's");
  }
}

void validate_update(const OptimizerConfig& config, Violations& violations) {
  check_range("--weight-decay", config.weight_decay, config.weight_decay >= 0, "0 or above",
              violations);
  const bool constant = config.weight_decay_incr_style == WeightDecayIncrStyle::kConstant;
  if (constant && (config.start_weight_decay || config.end_weight_decay)) {
    violations.add(
        "--start-weight-decay and --end-weight-decay have no effect with a constant weight decay",
        "--weight-decay-incr-style linear or cosine");
  }
  if (!constant && (!config.start_weight_decay || !config.end_weight_decay)) {
    violations.add("--weight-decay-incr-style linear and cosine need a ramp",
                   "give --start-weight-decay and --end-weight-decay");
  }
  if (config.start_weight_decay && config.end_weight_decay &&
      (*config.start_weight_decay < 0 || *config.end_weight_decay < *config.start_weight_decay)) {
    violations.add(cat("the weight decay ramps from ", *config.start_weight_decay, " to ",
                       *config.end_weight_decay),
                   "0 <= --start-weight-decay <= --end-weight-decay");
  }
  check_range("--adam-beta1", config.adam_beta1, config.adam_beta1 >= 0 && config.adam_beta1 < 1,
              "at least 0 and below 1", violations);
  check_range("--adam-beta2", config.adam_beta2, config.adam_beta2 >= 0 && config.adam_beta2 < 1,
              "at least 0 and below 1", violations);
  check_range("--adam-eps", config.adam_eps, config.adam_eps > 0, "above 0", violations);
  check_range("--sgd-momentum", config.sgd_momentum,
              config.sgd_momentum >= 0 && config.sgd_momentum < 1, "at least 0 and below 1",
              violations);
  check_range("--clip-grad", config.clip_grad, config.clip_grad >= 0, "0 (no clipping) or above",
              violations);
}

void validate_precision(const OptimizerConfig& config, Violations& violations) {
  if (config.fp16 && config.bf16) {
    violations.add("--fp16 excludes --bf16", "give one of the two");
  }
  if (config.loss_scale) {
    check_range("--loss-scale", *config.loss_scale, *config.loss_scale > 0, "above 0", violations);
    if (!config.fp16)
      violations.add("--loss-scale has no effect without --fp16", "drop it or add --fp16");
  }
  check_range("--min-loss-scale", config.min_loss_scale, config.min_loss_scale > 0, "above 0",
              violations);
  check_range("--initial-loss-scale", config.initial_loss_scale,
              config.initial_loss_scale >= config.min_loss_scale, "at least --min-loss-scale",
              violations);
  const double window = config.loss_scale_window;
  check_range("--loss-scale-window", window,
              window >= 1 && window < 1e15 && window == std::floor(window),
              "a whole number of at least 1", violations);
  check_range("--hysteresis", static_cast<double>(config.hysteresis), config.hysteresis >= 1,
              "1 or above", violations);
  check_range("--max-consecutive-bad-steps", static_cast<double>(config.max_consecutive_bad_steps),
              config.max_consecutive_bad_steps >= 1, "1 or above", violations);
}

void validate_states(const OptimizerConfig& config, Violations& violations) {
  const auto check = [&](const char* flag, StateType type) {
    if (type != StateType::kFp32 && !config.use_precision_aware_optimizer)
      violations.add(cat(flag, " has no effect without --use-precision-aware-optimizer"),
                     "give both");
  };
  check("--main-params-dtype", config.main_params_dtype);
  check("--exp-avg-dtype", config.exp_avg_dtype);
  check("--exp-avg-sq-dtype", config.exp_avg_sq_dtype);
  if (config.use_precision_aware_optimizer && !update_rule(config).narrow_states) {
    std::string names;
    for (const UpdateRule* rule : update_rules())
      if (rule->narrow_states) names += cat(names.empty() ? "" : " or ", rule->name);
    violations.add(cat("--use-precision-aware-optimizer supports only ", names),
                   cat("--optimizer ", names));
  }
  if (config.optimizer_cpu_offload && update_rule(config).needs_whole_matrices())
    violations.add(cat("--optimizer-cpu-offload is not built for --optimizer ", config.optimizer),
                   "its update needs whole matrices on the device");
  check_range("--optimizer-offload-fraction", config.optimizer_offload_fraction,
              config.optimizer_offload_fraction > 0 && config.optimizer_offload_fraction <= 1,
              "above 0, up to 1", violations);
  if (config.optimizer_offload_fraction != 1.0 && !config.optimizer_cpu_offload)
    violations.add("--optimizer-offload-fraction has no effect without --optimizer-cpu-offload",
                   "give both");
  if (config.main_params_dtype == StateType::kBf16 && !config.bf16)
    violations.add("--main-params-dtype bf16 needs weights in bf16", "--bf16");
}

}  // namespace

void OptimizerConfig::fields(FieldVisitor& visitor) {
  visitor.role(FieldRole::kNumerics);
  visit_learning_rate(*this, visitor);
  visit_update(*this, visitor);
  visit_precision(*this, visitor);
}

void OptimizerConfig::validate(Violations& violations) const {
  validate_learning_rate(*this, violations);
  validate_update(*this, violations);
  validate_precision(*this, violations);
  validate_states(*this, violations);
}

}  // namespace megatron
