// Flags of the optimizer, of its schedules and of mixed precision.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "megatron/base/fields.h"
#include "megatron/kernels/step_control.h"

namespace megatron {

// Element type of a state of the optimizer.
enum class StateType { kFp32, kBf16 };

struct OptimizerConfig : Config {
  std::string optimizer = "adam";  // a name of update_rules()

  // -- learning rate
  std::optional<double> lr;  // required for training
  double min_lr = 0.0;
  LrDecayStyle lr_decay_style = LrDecayStyle::kLinear;
  std::optional<int64_t> lr_decay_iters;  // default: length of training
  std::optional<int64_t> lr_decay_samples;
  std::optional<double> lr_warmup_fraction;
  int64_t lr_warmup_iters = 0;
  int64_t lr_warmup_samples = 0;
  double lr_warmup_init = 0.0;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::kExponential;
  std::optional<int64_t> lr_wsd_decay_iters;
  std::optional<int64_t> lr_wsd_decay_samples;
  std::optional<double> decoupled_lr;  // for embedding and output layer
  std::optional<double> decoupled_min_lr;
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;

  // -- update
  double weight_decay = 0.01;
  std::optional<double> start_weight_decay;
  std::optional<double> end_weight_decay;
  WeightDecayIncrStyle weight_decay_incr_style = WeightDecayIncrStyle::kConstant;
  bool apply_wd_to_qk_layernorm = false;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  double sgd_momentum = 0.9;
  double clip_grad = 1.0;

  // -- mixed precision
  bool fp16 = false;
  bool bf16 = false;
  std::optional<double> loss_scale;  // constant scale; default: dynamic for fp16
  double initial_loss_scale = 4294967296.0;
  double min_loss_scale = 1.0;
  double loss_scale_window = 1000.0;
  int64_t hysteresis = 2;

  // -- precision of the states
  bool use_precision_aware_optimizer = false;
  StateType main_params_dtype = StateType::kFp32;
  StateType main_grads_dtype = StateType::kFp32;
  StateType exp_avg_dtype = StateType::kFp32;
  StateType exp_avg_sq_dtype = StateType::kFp32;

  // -- place of the states
  bool optimizer_cpu_offload = false;
  // Fraction of the elements that is offloaded, rounded up to whole parameters
  double optimizer_offload_fraction = 1.0;

  // -- bad steps
  bool check_for_nan_in_loss_and_grad = true;
  int64_t max_consecutive_bad_steps = 10;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  bool dynamic_loss_scale() const { return fp16 && !loss_scale; }
};

}  // namespace megatron
