// The decisions of an optimizer step: skip or not, loss scale, clip coefficient, learning rate,
// weight decay, counts.
//
// The record is on the same device as the weights, and one plain inline function updates it, on the
// host as on a device, so that no step waits for the host. All arithmetic is double. The schedules
// count samples.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define MEGATRON_DEVICE_TOO __host__ __device__
#else
#define MEGATRON_DEVICE_TOO
#endif

namespace megatron {

enum class LrDecayStyle : int64_t { kConstant, kLinear, kCosine, kInverseSquareRoot, kWsd };
enum class WsdDecayStyle : int64_t { kExponential, kLinear, kCosine, kMinusSqrt };
enum class WeightDecayIncrStyle : int64_t { kConstant, kLinear, kCosine };

// 0: most parameters; 1: embedding and output layer with --decoupled-lr
inline constexpr int kNumLrGroups = 2;

// Learning rate and weight decay as functions of the samples seen by successful steps.
struct ParameterSchedule {
  double max_lr[kNumLrGroups] = {};
  double min_lr[kNumLrGroups] = {};
  double lr_warmup_init = 0.0;
  double lr_warmup_steps = 0.0;
  double lr_decay_steps = 0.0;
  double wsd_decay_steps = 0.0;
  double start_weight_decay = 0.0;
  double end_weight_decay = 0.0;
  double weight_decay_incr_steps = 0.0;
  LrDecayStyle lr_decay_style = LrDecayStyle::kLinear;
  WsdDecayStyle wsd_decay_style = WsdDecayStyle::kExponential;
  WeightDecayIncrStyle weight_decay_incr_style = WeightDecayIncrStyle::kConstant;
};

// Constants of a run that step_control() reads.
struct StepRules {
  double clip_grad = 1.0;          // maximal gradient norm; 0: no clipping
  int64_t dynamic_loss_scale = 0;  // 1: grows and shrinks
  double min_loss_scale = 1.0;
  int64_t loss_scale_window = 1000;  // consecutive good steps before the scale doubles
  int64_t hysteresis = 2;            // bad steps before the scale halves
  // 0: a non-finite step is applied (never with a dynamic loss scale)
  int64_t skip_non_finite = 1;
};

// The record. Every member has eight bytes; checkpoints store the members that for_each_field()
// lists.
struct StepState {
  int64_t num_steps = 0;   // samples of all successful steps
  int64_t adam_steps = 0;  // successful steps
  double loss_scale = 1.0;
  int64_t growth_tracker = 0;  // good steps since the scale changed or a step was bad
  int64_t hysteresis_tracker = 2;
  int64_t num_skipped = 0;      // steps that did not change the weights
  int64_t num_non_finite = 0;   // non-finite steps that a lower loss scale could not have avoided
  int64_t consecutive_bad = 0;  // current run of consecutive such steps
  // Results of the latest step:
  int64_t skip = 0;        // the step was skipped
  double grad_norm = 0.0;  // norm of the unscaled gradient, before clipping
  double clip_coefficient = 1.0;
  // Factor for stored gradients: 1 / (loss scale * weight) * clip
  double grad_factor = 1.0;
  double weight_decay = 0.0;
  double lr[kNumLrGroups] = {};
};

// Calls visitor(name, member) for each member, in order.
template <class State, class Visitor>
void for_each_field(State& state, Visitor&& visitor) {
  visitor("num_steps", state.num_steps);
  visitor("adam_steps", state.adam_steps);
  visitor("loss_scale", state.loss_scale);
  visitor("growth_tracker", state.growth_tracker);
  visitor("hysteresis_tracker", state.hysteresis_tracker);
  visitor("num_skipped", state.num_skipped);
  visitor("num_non_finite", state.num_non_finite);
  visitor("consecutive_bad", state.consecutive_bad);
  visitor("skip", state.skip);
  visitor("grad_norm", state.grad_norm);
  visitor("clip_coefficient", state.clip_coefficient);
  visitor("grad_factor", state.grad_factor);
  visitor("weight_decay", state.weight_decay);
  visitor("lr", state.lr[0]);
  visitor("decoupled_lr", state.lr[1]);
}

// Inputs of one step.
struct StepInputs {
  // Sum of squares of the stored gradients (times loss scale, not divided by the weight)
  double sum_of_squares = 0.0;
  // Weight of the losses of this step over all micro-batches and ranks; if zero, 1 is used
  double total_weight = 1.0;
  int64_t samples = 0;  // samples of this step over all ranks
};

// Fraction of the way from min_lr to max_lr in the stable-then-decay style.
MEGATRON_DEVICE_TOO inline double wsd_fraction(const ParameterSchedule& s, double n) {
  const double begin = s.lr_decay_steps - s.wsd_decay_steps;
  if (n <= begin) return 1.0;
  const double r = (n - begin) / s.wsd_decay_steps;
  switch (s.wsd_decay_style) {
    case WsdDecayStyle::kLinear:
      return 1.0 - r;
    case WsdDecayStyle::kCosine:
      return 0.5 * (cos(3.14159265358979323846 * r) + 1.0);
    case WsdDecayStyle::kMinusSqrt:
      return 1.0 - sqrt(r);
    case WsdDecayStyle::kExponential:
      break;
  }
  return 2.0 * pow(0.5, r) - 1.0;
}

// Learning rate of a group after n samples, as in Megatron.
MEGATRON_DEVICE_TOO inline double learning_rate(const ParameterSchedule& s, int group, double n) {
  const double max_lr = s.max_lr[group], min_lr = s.min_lr[group];
  const double warmup = s.lr_warmup_steps;
  if (warmup > 0 && n <= warmup) return s.lr_warmup_init + (max_lr - s.lr_warmup_init) * n / warmup;
  if (s.lr_decay_style == LrDecayStyle::kConstant) return max_lr;
  if (n > s.lr_decay_steps) return min_lr;
  if (s.lr_decay_style == LrDecayStyle::kInverseSquareRoot) {
    return fmax(min_lr, max_lr * sqrt(fmax(warmup, 1.0)) / sqrt(fmax(n, 1.0)));
  }
  const double range = s.lr_decay_steps - warmup;
  const double r = range > 0 ? (n - warmup) / range : 1.0;
  double fraction = 1.0 - r;
  if (s.lr_decay_style == LrDecayStyle::kCosine) {
    fraction = 0.5 * (cos(3.14159265358979323846 * r) + 1.0);
  } else if (s.lr_decay_style == LrDecayStyle::kWsd) {
    fraction = wsd_fraction(s, n);
  }
  return min_lr + fraction * (max_lr - min_lr);
}

// Weight decay after n samples, without a parameter's multiplier, as in Megatron.
MEGATRON_DEVICE_TOO inline double weight_decay(const ParameterSchedule& s, double n) {
  if (s.weight_decay_incr_style == WeightDecayIncrStyle::kConstant ||
      n > s.weight_decay_incr_steps) {
    return s.end_weight_decay;
  }
  const double r = s.weight_decay_incr_steps > 0 ? n / s.weight_decay_incr_steps : 1.0;
  const double fraction = s.weight_decay_incr_style == WeightDecayIncrStyle::kLinear
                              ? r
                              : 0.5 * (cos(3.14159265358979323846 * (1.0 - r)) + 1.0);
  return s.start_weight_decay + fraction * (s.end_weight_decay - s.start_weight_decay);
}

// After a good step: the scale doubles after a window of such steps, which also resets the
// hysteresis.
MEGATRON_DEVICE_TOO inline void grow_loss_scale(StepState& state, const StepRules& rules) {
  if (++state.growth_tracker < rules.loss_scale_window) return;
  state.growth_tracker = 0;
  state.hysteresis_tracker = rules.hysteresis;
  state.loss_scale *= 2.0;
}

// After a bad step: once the hysteresis is used up, every bad step halves the scale.
MEGATRON_DEVICE_TOO inline void shrink_loss_scale(StepState& state, const StepRules& rules) {
  state.growth_tracker = 0;
  if (--state.hysteresis_tracker > 0) return;
  state.loss_scale = fmax(0.5 * state.loss_scale, rules.min_loss_scale);
}

// Decides the step. Afterwards state.skip, grad_factor, lr and weight_decay define the update.
//
// A non-finite step counts towards the stop rule (consecutive_bad) unless a dynamic loss scale can
// still be lowered.
MEGATRON_DEVICE_TOO inline void step_control(StepState& state, const ParameterSchedule& schedule,
                                             const StepRules& rules, const StepInputs& inputs) {
  const double weight = inputs.total_weight == 0.0 ? 1.0 : inputs.total_weight;
  const double unscale = 1.0 / (state.loss_scale * weight);
  state.grad_norm = sqrt(inputs.sum_of_squares) * fabs(unscale);
  state.clip_coefficient = 1.0;
  if (rules.clip_grad > 0) {
    const double coefficient = rules.clip_grad / (state.grad_norm + 1e-6);
    if (coefficient < 1.0) state.clip_coefficient = coefficient;
  }
  state.grad_factor = unscale * state.clip_coefficient;
  for (int group = 0; group < kNumLrGroups; ++group) {
    state.lr[group] = learning_rate(schedule, group, static_cast<double>(state.num_steps));
  }
  state.weight_decay = weight_decay(schedule, static_cast<double>(state.num_steps));

  // 0, or NaN if one of the two is NaN or infinite.
  const double probe = (state.grad_norm - state.grad_norm) + (weight - weight);
  const bool finite = probe == 0.0;
  const bool dynamic = rules.dynamic_loss_scale != 0;
  const bool can_lower = dynamic && state.loss_scale > rules.min_loss_scale;
  state.skip = !finite && (dynamic || rules.skip_non_finite != 0) ? 1 : 0;
  if (!finite && !can_lower) {
    ++state.num_non_finite;
    ++state.consecutive_bad;
  } else if (finite) {
    state.consecutive_bad = 0;
  }
  if (dynamic) {
    if (finite) {
      grow_loss_scale(state, rules);
    } else {
      shrink_loss_scale(state, rules);
    }
  }
  if (state.skip) {
    ++state.num_skipped;
    return;
  }
  ++state.adam_steps;
  state.num_steps += inputs.samples;
}

}  // namespace megatron

#undef MEGATRON_DEVICE_TOO
