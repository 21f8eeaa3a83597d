// The table of update rules, and a rule that is not in it: what a new one costs.
#include "megatron/optimizer/update_rules.h"

#include <gtest/gtest.h>

#include <cstring>

#include "megatron/base/check.h"
#include "megatron/optimizer/optimizer.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

constexpr int64_t kRuleSamples = 4;

// The learning rate times the sign of the momentum. On the CPU.
const UpdateRule& sign_rule() {
  static const UpdateRule rule = {
      .name = "sign",
      .states = {{"sign_momentum"}},
      .update =
          [](const OptimizerConfig& config, FlatUpdate& flat, const at::Tensor& record) {
            const auto& step = *static_cast<const StepState*>(record.const_data_ptr());
            if (step.skip != 0) return;
            const auto* blocks = static_cast<const UpdateBlock*>(flat.blocks.const_data_ptr());
            for (int64_t i = 0; i < flat.partials.numel(); ++i) {
              const UpdateBlock& block = blocks[i];
              const double lr = step.lr[block.lr_group] * block.lr_factor;
              const auto part = [&](const at::Tensor& tensor) {
                return tensor.narrow(0, block.begin, block.count);
              };
              part(flat.states[0])
                  .mul_(config.sgd_momentum)
                  .add_(part(flat.grad), step.grad_factor);
              part(flat.master)
                  .mul_(1.0 - lr * step.weight_decay * block.weight_decay_mult)
                  .sub_(part(flat.states[0]).sign(), lr);
              if (flat.value.defined()) part(flat.value).copy_(part(flat.master));
            }
          },
  };
  return rule;
}

OptimizerConfig rule_config() {
  OptimizerConfig config;
  config.lr = 1e-2;
  config.lr_decay_style = LrDecayStyle::kConstant;
  config.weight_decay = 0.1;
  return config;
}

// One rank whose model is updated by sign_rule().
struct SignRun {
  SignRun(const OptimizerConfig& config, at::ScalarType dtype) {
    model.declare("linear.weight", {30, 50});
    model.declare("linear.bias", {30}, ParameterRole::kBias);
    store = std::make_unique<DistributedDataParallel>(model, groups, dtype, at::kCPU);
    start_values(model);
    optimizer = std::make_unique<Optimizer>(
        sign_rule(), config, make_schedule(config, {100, std::nullopt, kRuleSamples}),
        std::vector<DistributedDataParallel*>{store.get()});
  }
  void step(int t) {
    set_gradients(model, *store, t, 0.1, 1.0);
    optimizer->step(1.0, kRuleSamples);
  }

  const ParallelGroups groups;
  TestModel model;
  std::unique_ptr<DistributedDataParallel> store;
  std::unique_ptr<Optimizer> optimizer;
};

std::vector<std::string> names_of(const std::vector<OptimizerState>& states) {
  std::vector<std::string> names;
  for (const OptimizerState& state : states)
    names.push_back(cat(state.name, " ", std::to_string(state.bytes())));
  return names;
}

TEST(UpdateRules, AreFoundByTheNameOfTheFlag) {
  OptimizerConfig config;
  EXPECT_EQ(update_rule(config).name, "adam");
  for (const UpdateRule* rule : update_rules()) {
    config.optimizer = rule->name;
    EXPECT_EQ(&update_rule(config), rule);
  }
  config.optimizer = "muon";
  try {
    update_rule(config);
    ADD_FAILURE() << "found";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "--optimizer is muon, expected one of adam, sgd");
  }
}

// What plans, checkpoints and the optimizer itself count.
TEST(UpdateRules, StatesFollowFromRuleAndTypes) {
  using Names = std::vector<std::string>;
  OptimizerConfig config;
  const auto states = [&](bool half_model) {
    return names_of(optimizer_states(update_rule(config), config, half_model));
  };
  EXPECT_EQ(states(false), (Names{"exp_avg 4", "exp_avg_sq 4"}));
  EXPECT_EQ(states(true), (Names{"fp32_param 4", "exp_avg 4", "exp_avg_sq 4"}));
  EXPECT_EQ(optimizer_state_bytes(config, false), 8);
  EXPECT_EQ(optimizer_state_bytes(config, true), 12);
  config.exp_avg_sq_dtype = StateType::kBf16;
  EXPECT_EQ(states(true), (Names{"fp32_param 4", "exp_avg 4", "exp_avg_sq 2"}));
  config.main_params_dtype = StateType::kBf16;
  EXPECT_EQ(states(true), (Names{"exp_avg 4", "exp_avg_sq 2"}));
  EXPECT_EQ(optimizer_state_bytes(config, true), 6);
  config = {};
  config.optimizer = "sgd";
  EXPECT_EQ(states(false), (Names{"momentum_buffer 4"}));
  EXPECT_EQ(optimizer_state_bytes(config, true), 8);
  EXPECT_EQ(names_of(optimizer_states(sign_rule(), config, true)),
            (Names{"fp32_param 4", "sign_momentum 4"}));
}

TEST(UpdateRules, ARuleOutsideTheTableTrains) {
  const OptimizerConfig config = rule_config();
  SignRun run(config, at::kDouble);
  std::vector<at::Tensor> values, momentum;
  for (size_t k = 0; k < 2; ++k) {
    values.push_back(run.model[k].value.clone());
    momentum.push_back(at::zeros_like(values.back()));
  }
  for (int t = 0; t < 4; ++t) {
    run.step(t);
    const double factor = run.optimizer->read_state().grad_factor;
    for (size_t k = 0; k < 2; ++k) {
      momentum[k] = momentum[k] * 0.9 + run.store->grad(run.model[k]) * factor;
      values[k] = values[k] * (k == 0 ? 1.0 - 1e-2 * 0.1 : 1.0) - momentum[k].sign() * 1e-2;
      EXPECT_TRUE(at::allclose(run.model[k].value, values[k], 0, 1e-14)) << t << " " << k;
    }
  }
  const std::vector<StateTensor> kept = run.optimizer->tensors();
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0].description.key, "optimizer.state.sign_momentum.linear.weight");
  EXPECT_TRUE(at::allclose(kept[0].data.view({30, 50}), momentum[0], 0, 1e-14));
}

// Master weights and host memory come with the table, whatever the rule.
TEST(UpdateRules, StatesInHostMemoryChangeNoBit) {
  OptimizerConfig config = rule_config();
  SignRun plain(config, at::kBFloat16);
  config.optimizer_cpu_offload = true;
  SignRun offloaded(config, at::kBFloat16);
  for (int t = 0; t < 3; ++t) {
    plain.step(t);
    offloaded.step(t);
  }
  const std::vector<StateTensor> a = plain.optimizer->tensors(), b = offloaded.optimizer->tensors();
  ASSERT_EQ(a.size(), 4u) << "master weights and momentum of two parameters";
  ASSERT_EQ(b.size(), a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].description.key, b[i].description.key);
    EXPECT_TRUE(at::equal(a[i].data, b[i].data)) << a[i].description.key;
  }
  EXPECT_TRUE(at::equal(plain.store->flat_values(), offloaded.store->flat_values()));
}

TEST(UpdateRules, WholeMatricesAreNotKeptInHostMemory) {
  static const UpdateRule rule = {
      .name = "whole",
      .states = {},
      .update = [](const OptimizerConfig&, FlatUpdate&, const at::Tensor&) {},
      .update_matrix = [](const OptimizerConfig&, MatrixUpdate&, const at::Tensor&) {}};
  OptimizerConfig config = rule_config();
  config.optimizer_cpu_offload = true;
  SignRun run(rule_config(), at::kFloat);
  try {
    const Optimizer optimizer(rule, config, run.optimizer->schedule(), {run.store.get()});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "--optimizer-cpu-offload is not built for --optimizer whole, which needs whole "
                 "matrices on the device");
  }
}

}  // namespace
}  // namespace megatron
