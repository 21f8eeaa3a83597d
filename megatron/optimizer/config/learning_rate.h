// The learning rate over a run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/kernels/step_control.h"

namespace megatron {

struct LrFactor {
  std::string name;  // of parameters: a pattern as of --freeze
  double factor = 1.0;
};

struct LearningRateConfig {
  std::optional<double> lr;  // required for training
  double min_lr = 0.0;
  LrDecayStyle lr_decay_style = LrDecayStyle::kLinear;
  std::optional<int64_t> lr_decay_iters, lr_decay_samples;  // default: length of training
  std::optional<double> lr_warmup_fraction;
  int64_t lr_warmup_iters = 0, lr_warmup_samples = 0;
  double lr_warmup_init = 0.0;
  WsdDecayStyle lr_wsd_decay_style = WsdDecayStyle::kExponential;
  std::optional<int64_t> lr_wsd_decay_iters, lr_wsd_decay_samples;
  std::optional<double> decoupled_lr, decoupled_min_lr;  // for embedding and output layer
  std::vector<std::string> lr_factors;                   // NAME=FACTOR, see rate_factors()
  bool override_opt_param_scheduler = false;
  bool use_checkpoint_opt_param_scheduler = false;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;

  // lr_factors in parts; what is no number is NaN.
  std::vector<LrFactor> rate_factors() const;
};

}  // namespace megatron
