#include "megatron/optimizer/optimizer_config.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/base/parse.h"

namespace megatron {
namespace {

ParseResult parse(OptimizerConfig& config, std::vector<const char*> flags) {
  flags.insert(flags.begin(), "test");
  Config* configs[] = {&config};
  return parse_flags(configs, static_cast<int>(flags.size()), flags.data());
}

std::string usage_error(std::vector<const char*> flags) {
  OptimizerConfig config;
  try {
    parse(config, std::move(flags));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(OptimizerConfig, ReadsItsFlags) {
  OptimizerConfig config;
  parse(config, {"--lr",
                 "3e-4",
                 "--min-lr",
                 "3e-5",
                 "--lr-decay-style",
                 "WSD",
                 "--lr-wsd-decay-style",
                 "minus_sqrt",
                 "--lr-wsd-decay-iters",
                 "5",
                 "--lr-decay-iters",
                 "50",
                 "--lr-warmup-fraction",
                 "0.1",
                 "--optimizer",
                 "sgd",
                 "--sgd-momentum",
                 "0.8",
                 "--weight-decay-incr-style",
                 "cosine",
                 "--start-weight-decay",
                 "0",
                 "--end-weight-decay",
                 "0.1",
                 "--clip-grad",
                 "0.5",
                 "--fp16",
                 "--loss-scale-window",
                 "100",
                 "--hysteresis",
                 "4",
                 "--override-opt_param-scheduler",
                 "--no-check-for-nan-in-loss-and-grad",
                 "--apply-wd-to-qk-layernorm",
                 "--decoupled-lr",
                 "1e-3",
                 "--max-consecutive-bad-steps",
                 "3"});
  EXPECT_EQ(config.lr, 3e-4);
  EXPECT_EQ(config.lr_decay_style, LrDecayStyle::kWsd);
  EXPECT_EQ(config.lr_wsd_decay_style, WsdDecayStyle::kMinusSqrt);
  EXPECT_EQ(config.optimizer, "sgd");
  EXPECT_EQ(config.weight_decay_incr_style, WeightDecayIncrStyle::kCosine);
  EXPECT_EQ(config.loss_scale_window, 100.0);
  EXPECT_TRUE(config.dynamic_loss_scale());
  EXPECT_TRUE(config.override_opt_param_scheduler);
  EXPECT_FALSE(config.check_for_nan_in_loss_and_grad);
  EXPECT_TRUE(config.apply_wd_to_qk_layernorm);
  EXPECT_EQ(config.max_consecutive_bad_steps, 3);
}

TEST(OptimizerConfig, DefaultsAreMegatrons) {
  OptimizerConfig config;
  parse(config, {"--lr", "1e-3"});
  EXPECT_EQ(config.lr_decay_style, LrDecayStyle::kLinear);
  EXPECT_EQ(config.weight_decay, 0.01);
  EXPECT_EQ(config.clip_grad, 1.0);
  EXPECT_EQ(config.adam_beta2, 0.999);
  EXPECT_EQ(config.initial_loss_scale, 4294967296.0);
  EXPECT_TRUE(config.check_for_nan_in_loss_and_grad);
}

TEST(OptimizerConfig, EveryRuleIsNamed) {
  const std::pair<std::vector<const char*>, const char*> cases[] = {
      {{"--lr", "1e-4", "--min-lr", "1e-3"}, "--min-lr 0.001 is above --lr 0.0001"},
      {{"--lr", "-1"}, "--lr is -1"},
      {{"--lr", "1", "--decoupled-min-lr", "1"},
       "--decoupled-min-lr is given without --decoupled-lr"},
      {{"--lr", "1", "--min-lr", "0.5", "--decoupled-lr", "0.1"},
       "0.5, is above --decoupled-lr 0.1"},
      {{"--lr", "1", "--lr-factors", "a=1", "b"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b="}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=0"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=-2"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=inf"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=nan"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=1e999"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "b=1x"}, "--lr-factors has no positive number for \"b\""},
      {{"--lr", "1", "--lr-factors", "=1"}, "--lr-factors has no positive number for \"\""},
      {{"--lr", "1", "--lr-factors", "b=1", "c=1", "b=2"}, "--lr-factors names b twice"},
      {{"--lr", "1", "--lr-warmup-fraction", "1"}, "--lr-warmup-fraction is 1"},
      {{"--lr", "1", "--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "2"},
       "--lr-warmup-fraction excludes"},
      {{"--lr", "1", "--lr-warmup-iters", "-2"}, "--lr-warmup-iters is -2"},
      {{"--lr", "1", "--lr-warmup-samples", "-2"}, "--lr-warmup-samples is -2"},
      {{"--lr", "1", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"},
       "--override-opt-param-scheduler excludes"},
      {{"--lr", "1", "--weight-decay", "-1"}, "--weight-decay is -1"},
      {{"--lr", "1", "--end-weight-decay", "1"}, "have no effect with a constant weight decay"},
      {{"--lr", "1", "--weight-decay-incr-style", "linear"}, "need a ramp"},
      {{"--lr", "1", "--weight-decay-incr-style", "linear", "--start-weight-decay", "2",
        "--end-weight-decay", "1"},
       "the weight decay ramps from 2 to 1"},
      {{"--lr", "1", "--adam-beta1", "1"}, "--adam-beta1 is 1"},
      {{"--lr", "1", "--adam-beta2", "-0.5"}, "--adam-beta2 is -0.5"},
      {{"--lr", "1", "--adam-eps", "0"}, "--adam-eps is 0"},
      {{"--lr", "1", "--sgd-momentum", "1"}, "--sgd-momentum is 1"},
      {{"--lr", "1", "--clip-grad", "-1"}, "--clip-grad is -1"},
      {{"--lr", "1", "--fp16", "--bf16"}, "--fp16 excludes --bf16"},
      {{"--lr", "1", "--loss-scale", "8"}, "--loss-scale has no effect without --fp16"},
      {{"--lr", "1", "--fp16", "--loss-scale", "0"}, "--loss-scale is 0"},
      {{"--lr", "1", "--min-loss-scale", "0"}, "--min-loss-scale is 0"},
      {{"--lr", "1", "--initial-loss-scale", "0.5"}, "--initial-loss-scale is 0.5"},
      {{"--lr", "1", "--loss-scale-window", "1.5"}, "--loss-scale-window is 1.5"},
      {{"--lr", "1", "--hysteresis", "0"}, "--hysteresis is 0"},
      {{"--lr", "1", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0"},
       "--optimizer-offload-fraction is 0"},
      {{"--lr", "1", "--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.5"},
       "--optimizer-offload-fraction is 1.5"},
      {{"--lr", "1", "--optimizer-offload-fraction", "0.5"},
       "--optimizer-offload-fraction has no effect without --optimizer-cpu-offload"},
      {{"--lr", "1", "--max-consecutive-bad-steps", "0"}, "--max-consecutive-bad-steps is 0"},
  };
  for (const auto& [flags, expected] : cases) {
    EXPECT_NE(usage_error(flags).find(expected), std::string::npos)
        << expected << "\ngot: " << usage_error(flags);
  }
}

TEST(OptimizerConfig, PrecisionOfTheStates) {
  const auto first = [](const std::function<void(OptimizerConfig&)>& change) {
    OptimizerConfig config;
    config.use_precision_aware_optimizer = config.bf16 = true;
    change(config);
    Violations violations;
    config.validate(violations);
    return violations.empty() ? std::string() : violations.messages()[0];
  };
  using Config = OptimizerConfig;
  EXPECT_EQ(first([](Config& c) {
              c.main_params_dtype = c.exp_avg_dtype = c.exp_avg_sq_dtype = StateType::kBf16;
            }),
            "");
  EXPECT_EQ(
      first([](Config& c) {
        c.use_precision_aware_optimizer = false, c.exp_avg_sq_dtype = StateType::kBf16;
      }),
      "--exp-avg-sq-dtype has no effect without --use-precision-aware-optimizer\nhint: give both");
  EXPECT_EQ(first([](Config& c) { c.optimizer = "sgd"; }),
            "--use-precision-aware-optimizer supports only adam\nhint: --optimizer adam");
  EXPECT_EQ(first([](Config& c) { c.bf16 = false, c.main_params_dtype = StateType::kBf16; }),
            "--main-params-dtype bf16 needs weights in bf16\nhint: --bf16");
}

}  // namespace
}  // namespace megatron
