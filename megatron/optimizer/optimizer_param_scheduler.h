// Builds the schedule of learning rate and weight decay, in samples, from flags.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "megatron/optimizer/optimizer_config.h"

namespace megatron {

// The length of a run: either in iterations or in samples.
struct TrainLength {
  std::optional<int64_t> train_iters;
  std::optional<int64_t> train_samples;
  int64_t global_batch_size = 1;
};

// Rules that involve both: iteration-based runs take no sample-based options and vice versa;
// warm-up must end before decay does. Adds one violation per broken rule.
void validate_schedule(const OptimizerConfig& config, const TrainLength& length,
                       Violations& violations);

ParameterSchedule make_schedule(const OptimizerConfig& config, const TrainLength& length);
StepRules make_step_rules(const OptimizerConfig& config);
StepState initial_step_state(const OptimizerConfig& config);

// The schedule as JSON object text under Megatron's keys (max_lr, lr_warmup_steps, num_steps,
// lr_decay_style, ...), and back. Old Megatron keys (start_lr, decay_step, warmup_iter, ...) are
// accepted. Numbers are exact.
std::string schedule_to_json(const ParameterSchedule& schedule);
ParameterSchedule schedule_from_json(const std::string& text);

// The schedule with which to continue from a checkpoint: equal values, or the flags' with
// --override-opt-param-scheduler, or the stored ones with --use-checkpoint-opt-param-scheduler.
// Otherwise throws Error that names every differing value, with both. Values without effect (the
// ramp length of a constant weight decay) may differ.
ParameterSchedule resume_schedule(const ParameterSchedule& from_flags,
                                  const ParameterSchedule& stored, const OptimizerConfig& config);

// The record of step_control() as JSON object text, and back. Exact; NaN and infinities are spelled
// as strings. A missing key throws Error naming it.
std::string step_state_to_json(const StepState& state);
StepState step_state_from_json(const std::string& text);

}  // namespace megatron
