// Fifty steps with clipping, warm-up, cosine decay and increasing weight decay, against PyTorch.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/optimizer/optimizer.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

constexpr int kGoldenSteps = 50;
constexpr int64_t kGoldenSamples = 8;

OptimizerConfig golden_config(const std::string& rule) {
  OptimizerConfig config;
  config.optimizer = rule;
  config.lr = 3e-2;
  config.min_lr = 3e-3;
  config.decoupled_lr = 1e-2;
  config.decoupled_min_lr = 1e-3;
  config.lr_decay_style = LrDecayStyle::kCosine;
  config.lr_warmup_iters = 5;
  config.lr_decay_iters = 45;
  config.adam_beta2 = 0.95;
  config.weight_decay_incr_style = WeightDecayIncrStyle::kLinear;
  config.start_weight_decay = 0.05;
  config.end_weight_decay = 0.2;
  return config;
}

// The largest distance of a parameter from PyTorch's after fifty steps; also compares norm and
// learning rate of each step.
double largest_error(const std::string& rule, at::ScalarType dtype, double step_tolerance) {
  std::ifstream file(std::string(MEGATRON_SOURCE_DIR) +
                     "/tests/golden/optimizer/optimizer_golden.json");
  const auto all = nlohmann::json::parse(file);
  const auto& golden = all.at(rule);
  TestModel model;
  model.declare("embedding.word_embeddings.weight", {7, 4}, ParameterRole::kEmbedding);
  model.declare("decoder.layers.0.mlp.linear_fc1.weight", {5, 4});
  model.declare("decoder.layers.0.mlp.linear_fc1.bias", {5}, ParameterRole::kBias);
  model.declare("decoder.final_layernorm.weight", {4}, ParameterRole::kNorm);
  const ParallelGroups groups;
  DistributedDataParallel ddp(model, groups, dtype, at::kCPU);
  start_values(model);
  const OptimizerConfig config = golden_config(rule);
  const TrainLength length{kGoldenSteps, std::nullopt, kGoldenSamples};
  Optimizer optimizer(config, make_schedule(config, length), ddp);
  for (int t = 0; t < kGoldenSteps; ++t) {
    const double weight = 1.0 + 30.0 * t;  // cancels: the gradients are those of the loss sum
    set_gradients(model, ddp, t, 0.02 + (t % 5 == 3 ? 0.4 : 0.0), weight);
    optimizer.step(weight, kGoldenSamples);
    const StepState state = optimizer.read_state();
    EXPECT_NEAR(state.grad_norm, golden.at("grad_norm")[t].get<double>(), step_tolerance)
        << "step " << t;
    EXPECT_NEAR(state.lr[0], golden.at("lr")[t].get<double>(), 1e-15) << "step " << t;
    EXPECT_EQ(state.clip_coefficient < 1.0, golden.at("grad_norm")[t].get<double>() > 1.0 - 1e-6);
  }
  double error = 0.0;
  for (size_t k = 0; k < model.size(); ++k) {
    const auto expected = golden.at("parameters").at(model[k].name).get<std::vector<double>>();
    const at::Tensor want = at::tensor(expected, at::kDouble);
    error = std::max(error,
                     (model[k].value.to(at::kDouble).flatten() - want).abs().max().item<double>());
  }
  return error;
}

TEST(Golden, AdamWEqualsPyTorch) {
  EXPECT_LT(largest_error("adam", at::kDouble, 1e-11), 1e-11);
  EXPECT_LT(largest_error("adam", at::kFloat, 1e-4), 2e-5);
}

TEST(Golden, SgdEqualsPyTorch) {
  EXPECT_LT(largest_error("sgd", at::kDouble, 1e-12), 1e-12);
  EXPECT_LT(largest_error("sgd", at::kFloat, 1e-5), 1e-5);
}

}  // namespace
}  // namespace megatron
