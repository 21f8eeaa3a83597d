// Schedules, loss scale, clipping and skipped steps, against numbers of Megatron-LM.
#include "megatron/kernels/step_control.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace megatron {
namespace {

ParameterSchedule vector_schedule(LrDecayStyle style) {
  ParameterSchedule schedule;
  schedule.max_lr[0] = 3e-4;
  schedule.min_lr[0] = 3e-5;
  schedule.max_lr[1] = 1e-2;
  schedule.min_lr[1] = 1e-3;
  schedule.lr_warmup_steps = 100;
  schedule.lr_decay_steps = 1000;
  schedule.wsd_decay_steps = 200;
  schedule.lr_decay_style = style;
  return schedule;
}

void expect_lr(const ParameterSchedule& schedule, std::vector<std::pair<double, double>> expected) {
  for (const auto& [n, lr] : expected) {
    EXPECT_NEAR(learning_rate(schedule, 0, n), lr, 6e-14) << "after " << n << " samples";
  }
}

TEST(LearningRate, Linear) {
  expect_lr(vector_schedule(LrDecayStyle::kLinear), {{0, 0},
                                                     {50, 1.5e-4},
                                                     {100, 3e-4},
                                                     {101, 2.997e-4},
                                                     {500, 1.8e-4},
                                                     {900, 6e-5},
                                                     {1000, 3e-5},
                                                     {1001, 3e-5}});
}

TEST(LearningRate, Cosine) {
  expect_lr(vector_schedule(LrDecayStyle::kCosine), {{50, 1.5e-4},
                                                     {100, 3e-4},
                                                     {101, 2.999991775e-4},
                                                     {500, 1.884425040e-4},
                                                     {900, 3.814149619e-5},
                                                     {1000, 3e-5},
                                                     {1001, 3e-5}});
}

TEST(LearningRate, InverseSquareRoot) {
  expect_lr(vector_schedule(LrDecayStyle::kInverseSquareRoot), {{50, 1.5e-4},
                                                                {100, 3e-4},
                                                                {101, 2.985111571e-4},
                                                                {500, 1.341640786e-4},
                                                                {900, 1.0e-4},
                                                                {1000, 9.486832981e-5},
                                                                {1001, 3e-5}});
}

TEST(LearningRate, WarmupStableDecay) {
  ParameterSchedule schedule = vector_schedule(LrDecayStyle::kWsd);
  expect_lr(schedule, {{50, 1.5e-4},
                       {101, 3e-4},
                       {500, 3e-4},
                       {800, 3e-4},
                       {900, 1.418376618e-4},
                       {1000, 3e-5},
                       {1001, 3e-5}});
  schedule.wsd_decay_style = WsdDecayStyle::kLinear;
  expect_lr(schedule, {{800, 3e-4}, {900, 1.65e-4}, {1000, 3e-5}});
  schedule.wsd_decay_style = WsdDecayStyle::kMinusSqrt;
  expect_lr(schedule, {{800, 3e-4}, {900, 1.090811691e-4}, {1000, 3e-5}});
  schedule.wsd_decay_style = WsdDecayStyle::kCosine;
  expect_lr(schedule, {{800, 3e-4}, {900, 1.65e-4}, {1000, 3e-5}});
}

TEST(LearningRate, ConstantAndWarmupStart) {
  ParameterSchedule schedule = vector_schedule(LrDecayStyle::kConstant);
  schedule.lr_warmup_init = 1e-4;
  expect_lr(schedule, {{0, 1e-4}, {50, 2e-4}, {100, 3e-4}, {5000, 3e-4}});
  schedule.lr_warmup_steps = 0;
  expect_lr(schedule, {{0, 3e-4}});
}

TEST(LearningRate, GroupsHaveTheirOwnRange) {
  const ParameterSchedule schedule = vector_schedule(LrDecayStyle::kLinear);
  EXPECT_NEAR(learning_rate(schedule, 1, 50), 5e-3, 1e-15);
  EXPECT_NEAR(learning_rate(schedule, 1, 1000), 1e-3, 1e-15);
}

TEST(WeightDecay, Ramps) {
  ParameterSchedule schedule;
  schedule.start_weight_decay = 0.0;
  schedule.end_weight_decay = 0.1;
  schedule.weight_decay_incr_steps = 1000;
  schedule.weight_decay_incr_style = WeightDecayIncrStyle::kCosine;
  EXPECT_NEAR(weight_decay(schedule, 250), 1.464466094e-2, 6e-12);
  EXPECT_NEAR(weight_decay(schedule, 500), 5e-2, 1e-15);
  EXPECT_NEAR(weight_decay(schedule, 1000), 0.1, 1e-15);
  EXPECT_EQ(weight_decay(schedule, 1001), 0.1);
  schedule.weight_decay_incr_style = WeightDecayIncrStyle::kLinear;
  EXPECT_NEAR(weight_decay(schedule, 250), 0.025, 1e-15);
  schedule.weight_decay_incr_style = WeightDecayIncrStyle::kConstant;
  EXPECT_EQ(weight_decay(schedule, 0), 0.1);
}

// One step with a gradient of the given norm (times loss scale and weight, as stored).
void step(StepState& state, const StepRules& rules, double norm, double weight = 1.0) {
  const double stored = norm * state.loss_scale * weight;
  step_control(state, vector_schedule(LrDecayStyle::kLinear), rules, {stored * stored, weight, 8});
}

const double kInf = std::numeric_limits<double>::infinity();
const double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(StepControl, UnscalesAndClips) {
  StepState state;
  state.loss_scale = 1024;
  StepRules rules;
  rules.clip_grad = 1.0;
  step(state, rules, 4.0, 50.0);
  EXPECT_DOUBLE_EQ(state.grad_norm, 4.0);
  EXPECT_DOUBLE_EQ(state.clip_coefficient, 1.0 / (4.0 + 1e-6));
  EXPECT_DOUBLE_EQ(state.grad_factor, state.clip_coefficient / (1024 * 50.0));
  EXPECT_EQ(state.skip, 0);
  EXPECT_EQ(state.num_steps, 8);
  EXPECT_EQ(state.adam_steps, 1);

  step(state, rules, 0.5, 50.0);
  EXPECT_DOUBLE_EQ(state.grad_norm, 0.5);
  EXPECT_EQ(state.clip_coefficient, 1.0);
  rules.clip_grad = 0.0;
  step(state, rules, 100.0);
  EXPECT_EQ(state.clip_coefficient, 1.0) << "0 turns clipping off";
}

TEST(StepControl, AStepWithoutWeightDividesByOne) {
  StepState state;
  step_control(state, {}, {}, {4.0, 0.0, 8});
  EXPECT_EQ(state.grad_norm, 2.0);
  EXPECT_EQ(state.skip, 0);
}

TEST(StepControl, TheFirstStepUsesTheScheduleAtZero) {
  StepState state;
  step(state, {}, 1.0);
  EXPECT_EQ(state.lr[0], 0.0) << "warm-up starts at lr-warmup-init";
  step(state, {}, 1.0);
  EXPECT_DOUBLE_EQ(state.lr[0], 3e-4 * 8 / 100);
}

TEST(StepControl, NonFiniteStepsAreSkippedAndCounted) {
  for (const double bad : {kInf, kNaN}) {
    StepState state;
    StepRules rules;
    step(state, rules, 1.0);
    const StepState before = state;
    step(state, rules, bad);
    step(state, rules, bad);
    EXPECT_EQ(state.skip, 1);
    EXPECT_EQ(state.num_skipped, 2);
    EXPECT_EQ(state.num_non_finite, 2);
    EXPECT_EQ(state.consecutive_bad, 2);
    EXPECT_EQ(state.num_steps, before.num_steps) << "a skipped step does not advance the schedules";
    EXPECT_EQ(state.adam_steps, before.adam_steps);
    EXPECT_EQ(state.loss_scale, 1.0);
    step(state, rules, 1.0);
    EXPECT_EQ(state.skip, 0);
    EXPECT_EQ(state.consecutive_bad, 0);
    EXPECT_EQ(state.num_skipped, 2);
  }
  StepState state;
  step_control(state, {}, {}, {1.0, kNaN, 8});
  EXPECT_EQ(state.skip, 1) << "the weight of the losses counts too";
  step_control(state, {}, {}, {1.0, kInf, 8});
  EXPECT_EQ(state.consecutive_bad, 2);
}

TEST(StepControl, WithoutTheCheckBadStepsAreApplied) {
  StepState state;
  StepRules rules;
  rules.skip_non_finite = 0;
  step(state, rules, kNaN);
  EXPECT_EQ(state.skip, 0);
  EXPECT_EQ(state.num_non_finite, 1);
  EXPECT_EQ(state.num_skipped, 0);
  EXPECT_EQ(state.adam_steps, 1);
}

StepRules dynamic_rules(int64_t window, int64_t hysteresis) {
  StepRules rules;
  rules.dynamic_loss_scale = 1;
  rules.min_loss_scale = 1.0;
  rules.loss_scale_window = window;
  rules.hysteresis = hysteresis;
  rules.skip_non_finite = 0;  // a dynamic scale skips regardless
  return rules;
}

TEST(LossScale, GrowsAfterAWindowOfGoodSteps) {
  StepState state;
  state.loss_scale = 1024;
  const StepRules rules = dynamic_rules(3, 2);
  std::vector<double> scales;
  for (int i = 0; i < 7; ++i) {
    step(state, rules, 1.0);
    scales.push_back(state.loss_scale);
  }
  EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 2048, 2048, 2048, 4096, 4096}));
}

// Good steps do not refill the hysteresis; once it is used up every bad step halves the scale,
// until a growth refills it.
TEST(LossScale, Hysteresis) {
  StepState state;
  state.loss_scale = 1024;
  state.hysteresis_tracker = 2;
  const StepRules rules = dynamic_rules(3, 2);
  const std::string steps = "b g b b g g g b b";  // bad, good
  std::vector<double> scales;
  std::vector<int64_t> trackers;
  for (char kind : steps) {
    if (kind == ' ') continue;
    step(state, rules, kind == 'g' ? 1.0 : kInf);
    EXPECT_EQ(state.skip, kind == 'b');
    scales.push_back(state.loss_scale);
    trackers.push_back(state.hysteresis_tracker);
  }
  EXPECT_EQ(scales, (std::vector<double>{1024, 1024, 512, 256, 256, 256, 512, 512, 256}));
  EXPECT_EQ(trackers, (std::vector<int64_t>{1, 1, 0, -1, -1, -1, 2, 1, 0}));
  EXPECT_EQ(state.num_skipped, 5);
  EXPECT_EQ(state.num_non_finite, 0) << "a lower scale could have saved them";
}

TEST(LossScale, AtTheFloorBadStepsCountTowardsTheStopRule) {
  StepState state;
  state.loss_scale = 4;
  state.hysteresis_tracker = 1;
  const StepRules rules = dynamic_rules(1000, 1);
  std::vector<double> scales;
  for (int i = 0; i < 5; ++i) {
    step(state, rules, kInf);
    scales.push_back(state.loss_scale);
  }
  EXPECT_EQ(scales, (std::vector<double>{2, 1, 1, 1, 1}));
  EXPECT_EQ(state.consecutive_bad, 3);
  EXPECT_EQ(state.num_non_finite, 3);
  EXPECT_EQ(state.num_skipped, 5);
}

}  // namespace
}  // namespace megatron
