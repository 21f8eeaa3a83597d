#include "megatron/optimizer/optimizer_param_scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

std::vector<std::string> violations_of(const OptimizerConfig& config, const TrainLength& length) {
  Violations violations;
  validate_schedule(config, length, violations);
  return violations.messages();
}

OptimizerConfig schedule_config() {
  OptimizerConfig config;
  config.lr = 3e-4;
  config.min_lr = 3e-5;
  return config;
}

TEST(MakeSchedule, IterationsBecomeSamples) {
  OptimizerConfig config = schedule_config();
  config.lr_warmup_iters = 10;
  config.lr_wsd_decay_iters = 20;
  const ParameterSchedule schedule = make_schedule(config, {100, std::nullopt, 16});
  EXPECT_EQ(schedule.lr_decay_steps, 1600);
  EXPECT_EQ(schedule.lr_warmup_steps, 160);
  EXPECT_EQ(schedule.wsd_decay_steps, 320);
  EXPECT_EQ(schedule.weight_decay_incr_steps, 1600);
  config.lr_decay_iters = 50;
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 16}).lr_decay_steps, 800);
}

TEST(MakeSchedule, SamplesAndFractions) {
  OptimizerConfig config = schedule_config();
  config.lr_warmup_samples = 30;
  EXPECT_EQ(make_schedule(config, {std::nullopt, 1000, 16}).lr_decay_steps, 1000);
  EXPECT_EQ(make_schedule(config, {std::nullopt, 1000, 16}).lr_warmup_steps, 30);
  config.lr_warmup_samples = 0;
  config.lr_warmup_fraction = 0.25;
  config.lr_decay_samples = 400;
  EXPECT_EQ(make_schedule(config, {std::nullopt, 1000, 16}).lr_warmup_steps, 100);
}

TEST(MakeSchedule, DecoupledLearningRate) {
  OptimizerConfig config = schedule_config();
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 1}).max_lr[1], 3e-4);
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 1}).min_lr[1], 3e-5);
  config.decoupled_lr = 1e-3;
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 1}).max_lr[1], 1e-3);
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 1}).min_lr[1], 3e-5);
  config.decoupled_min_lr = 1e-4;
  EXPECT_EQ(make_schedule(config, {100, std::nullopt, 1}).min_lr[1], 1e-4);
}

TEST(ValidateSchedule, UnitsMayNotBeMixed) {
  OptimizerConfig config = schedule_config();
  EXPECT_TRUE(violations_of(config, {100, std::nullopt, 1}).empty());
  config.lr_decay_samples = 10;
  config.lr_warmup_samples = 5;
  auto messages = violations_of(config, {100, std::nullopt, 1});
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_NE(messages[0].find("--lr-decay-samples does not go with --train-iters"),
            std::string::npos);
  EXPECT_NE(messages[1].find("--lr-warmup-samples does not go with --train-iters"),
            std::string::npos);

  config = schedule_config();
  config.lr_decay_iters = 10;
  messages = violations_of(config, {std::nullopt, 100, 1});
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_NE(messages[0].find("--lr-decay-iters does not go with --train-samples"),
            std::string::npos);
  EXPECT_NE(
      violations_of(config, {100, 100, 1}).at(0).find("--train-iters excludes --train-samples"),
      std::string::npos);
}

TEST(ValidateSchedule, LengthsMustFit) {
  OptimizerConfig config = schedule_config();
  config.lr_warmup_iters = 100;
  EXPECT_NE(
      violations_of(config, {100, std::nullopt, 2}).at(0).find("(200 samples) does not end before"),
      std::string::npos);
  config = schedule_config();
  EXPECT_NE(violations_of(config, {0, std::nullopt, 2}).at(0).find("decays over 0 samples"),
            std::string::npos);
  config.lr_decay_style = LrDecayStyle::kWsd;
  EXPECT_NE(violations_of(config, {100, std::nullopt, 2})
                .at(0)
                .find("--lr-decay-style WSD needs the length"),
            std::string::npos);
  config.lr_wsd_decay_iters = 101;
  EXPECT_NE(violations_of(config, {100, std::nullopt, 2})
                .at(0)
                .find("the WSD tail of 202 samples is longer than the decay, 200"),
            std::string::npos);
}

TEST(ScheduleJson, IsExact) {
  OptimizerConfig config = schedule_config();
  config.lr = 0.1 + 0.2;
  config.lr_warmup_fraction = 1.0 / 3.0;
  config.lr_decay_style = LrDecayStyle::kInverseSquareRoot;
  config.lr_wsd_decay_style = WsdDecayStyle::kMinusSqrt;
  config.lr_wsd_decay_iters = 7;
  config.decoupled_lr = 1e-7;
  config.decoupled_min_lr = 1e-9;
  config.lr_warmup_init = 1e-5;
  config.weight_decay_incr_style = WeightDecayIncrStyle::kCosine;
  config.start_weight_decay = 0.01;
  config.end_weight_decay = 0.3;
  const ParameterSchedule schedule = make_schedule(config, {1000, std::nullopt, 3});
  const std::string text = schedule_to_json(schedule);
  EXPECT_EQ(schedule_to_json(schedule_from_json(text)), text);
  EXPECT_EQ(schedule_from_json(text).max_lr[0], 0.1 + 0.2);
  EXPECT_EQ(schedule_from_json(text).lr_decay_style, LrDecayStyle::kInverseSquareRoot);
  EXPECT_EQ(schedule_from_json(text).wsd_decay_style, WsdDecayStyle::kMinusSqrt);
}

TEST(ScheduleJson, AcceptsOldKeys) {
  const ParameterSchedule schedule = schedule_from_json(
      R"({"start_lr": 1e-3, "warmup_iter": 10, "end_iter": 100, "decay_style": "cosine", "min_lr": 1e-4,
          "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 100, "num_steps": 40})");
  EXPECT_EQ(schedule.max_lr[0], 1e-3);
  EXPECT_EQ(schedule.max_lr[1], 1e-3);
  EXPECT_EQ(schedule.lr_warmup_steps, 10);
  EXPECT_EQ(schedule.lr_decay_steps, 100);
  EXPECT_EQ(schedule.lr_decay_style, LrDecayStyle::kCosine);
}

TEST(ScheduleJson, ErrorsNameTheKey) {
  EXPECT_EQ(error_of([] { schedule_from_json("{\"min_lr\": 1}"); }),
            "stored schedule: key \"max_lr\" is missing");
  EXPECT_EQ(error_of([] { schedule_from_json("[1]"); }),
            "stored schedule is not a JSON object: [1]");
  EXPECT_EQ(
      error_of([] {
        schedule_from_json(
            R"({"max_lr": 1, "min_lr": 0, "lr_warmup_steps": 0, "lr_decay_steps": 1, "lr_decay_style": "steep"})");
      }),
      "stored schedule: lr_decay_style is \"steep\", which is no known style");
}

TEST(ResumeSchedule, DifferencesAreNamedWithBothValues) {
  OptimizerConfig config = schedule_config();
  const ParameterSchedule stored = make_schedule(config, {100, std::nullopt, 4});
  config.lr = 1e-3;
  const ParameterSchedule flags = make_schedule(config, {200, std::nullopt, 4});
  EXPECT_EQ(error_of([&] { resume_schedule(flags, stored, config); }),
            "the schedule of the flags differs from the checkpoint's\n"
            "detail: max_lr is 0.001 by the flags, 0.0003 in the checkpoint\n"
            "detail: lr_decay_steps is 800.0 by the flags, 400.0 in the checkpoint\n"
            "detail: decoupled_max_lr is 0.001 by the flags, 0.0003 in the checkpoint\n"
            "hint: --override-opt-param-scheduler takes the flags', "
            "--use-checkpoint-opt-param-scheduler the checkpoint's");
  config.override_opt_param_scheduler = true;
  EXPECT_EQ(resume_schedule(flags, stored, config).max_lr[0], 1e-3);
  config.override_opt_param_scheduler = false;
  config.use_checkpoint_opt_param_scheduler = true;
  EXPECT_EQ(resume_schedule(flags, stored, config).max_lr[0], 3e-4);
}

TEST(ResumeSchedule, WhatHasNoEffectMayDiffer) {
  OptimizerConfig config = schedule_config();
  config.lr_decay_iters = 100;
  const ParameterSchedule stored = make_schedule(config, {100, std::nullopt, 4});
  const ParameterSchedule longer = make_schedule(config, {300, std::nullopt, 4});
  EXPECT_EQ(resume_schedule(longer, stored, config).weight_decay_incr_steps, 1200);
}

TEST(StepStateJson, IsExact) {
  StepState state;
  double next = 0.1;
  int64_t count = int64_t{1} << 53;
  for_each_field(state, [&](const char*, auto& member) {
    if constexpr (std::is_same_v<std::decay_t<decltype(member)>, double>) {
      member = next = std::sqrt(next + 0.3);
    } else {
      member = ++count;
    }
  });
  state.grad_norm = std::numeric_limits<double>::infinity();
  state.grad_factor = std::nan("");
  const StepState copy = step_state_from_json(step_state_to_json(state));
  int fields = 0;
  for_each_field(state, [&](const char* name, const auto& member) {
    ++fields;
    for_each_field(copy, [&](const char* other, const auto& value) {
      if (std::string_view(name) != other) return;
      const double a = static_cast<double>(member), b = static_cast<double>(value);
      EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b))) << name;
    });
  });
  EXPECT_EQ(static_cast<size_t>(fields) * 8, sizeof(StepState))
      << "a member is missing in for_each_field";
  EXPECT_EQ(copy.num_steps, (int64_t{1} << 53) + 1);
  EXPECT_EQ(error_of([] { step_state_from_json("{}"); }),
            "stored optimizer state: key \"num_steps\" is missing");
  EXPECT_EQ(error_of([] { step_state_from_json("{\"num_steps\": 1.5}"); }),
            "stored optimizer state: num_steps is 1.5, expected a whole number");
}

TEST(InitialState, LossScale) {
  OptimizerConfig config = schedule_config();
  EXPECT_EQ(initial_step_state(config).loss_scale, 1.0);
  EXPECT_EQ(make_step_rules(config).dynamic_loss_scale, 0);
  config.fp16 = true;
  EXPECT_EQ(initial_step_state(config).loss_scale, 4294967296.0);
  EXPECT_EQ(initial_step_state(config).hysteresis_tracker, 2);
  EXPECT_EQ(make_step_rules(config).dynamic_loss_scale, 1);
  config.loss_scale = 128.0;
  EXPECT_EQ(initial_step_state(config).loss_scale, 128.0);
  EXPECT_EQ(make_step_rules(config).dynamic_loss_scale, 0);
}

}  // namespace
}  // namespace megatron
