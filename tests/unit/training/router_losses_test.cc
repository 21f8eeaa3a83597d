// Losses of routers in whole training steps: what they weigh, and what is logged of each layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>

#include "megatron/comm/thread_backend.h"
#include "megatron/models/common/routers.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/dpo_loss.h"
#include "tests/unit/training/measured_step.h"

namespace megatron {
namespace {

const std::string kRouted =
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --num-experts 4 --disable-bias-linear --attention-dropout 0 "
    "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.01 ";

struct LossesOfStep {
  std::vector<std::string> names;
  at::Tensor main;               // sum and weight of the main loss
  at::Tensor router;             // [names, 2]: the same of the auxiliary losses
  at::Tensor tokens_per_expert;  // [routers, E]
  at::Tensor of(const std::string& name) const {
    const auto found = std::find(names.begin(), names.end(), name);
    EXPECT_NE(found, names.end()) << name;
    return router[found - names.begin()];
  }
};

// One step over batches of which `mask` says the loss mask.
LossesOfStep step_of(const Arguments& a, const PretrainTask& task, const at::Tensor& mask,
                     const ParallelGroups& groups = {}) {
  TrainedModel model =
      build_model(task, a, {500, 512}, groups, at::kFloat, c10::kCPU, StartPoint{});
  Timers timers(0);
  const auto batch = [&] {
    Batch one = random_batch(a, groups);
    one.set("loss_mask", mask);
    one.totals = sequence_totals(mask, a.transformer.seq_length);
    return one;
  };
  StepOptions options = step_options(a, 0);
  options.keeps_tokens_per_expert = true;
  const StepOutcome outcome = train_step(model, task, options, batch, timers);
  const std::vector<std::string> names = model.auxiliary_losses();
  const auto count = static_cast<int64_t>(names.size());
  const at::Tensor& loss = outcome.loss;
  return {names, loss.narrow(0, 0, 2),
          loss.narrow(0, loss.numel() - 2 * count, 2 * count).view({count, 2}),
          outcome.tokens_per_expert};
}

at::Tensor mask_of(std::initializer_list<int64_t> lengths) {
  const at::Tensor mask = at::zeros({static_cast<int64_t>(lengths.size()), 16});
  int64_t row = 0;
  for (const int64_t length : lengths) mask[row++].narrow(0, 0, length).fill_(1);
  return mask;
}

TEST(RouterLosses, OfEachLayerAreLoggedIfAskedFor) {
  const std::string flags = kRouted + kRun + "--mtp-num-layers 1 ";
  const at::Tensor mask = mask_of({16, 12});
  const Arguments a = parse(flags + "--moe-per-layer-logging", 1);
  const LossesOfStep step = step_of(a, gpt_task(), mask);
  for (const std::string name : {"load_balancing_loss", "z_loss"}) {
    double sum = 0;
    for (int layer = 0; layer < 3; ++layer) {
      const at::Tensor one = step.of(cat("moe/", name, "_layer_", layer));
      sum += (one[0] / one[1]).item<double>();
      EXPECT_GT(one[0].item<double>(), 0) << name << " of layer " << layer;
    }
    const at::Tensor all = step.of(name);
    EXPECT_NEAR((all[0] / all[1]).item<double>(), sum / 3, 1e-5 * sum);
  }
  const LossesOfStep without = step_of(parse(flags, 1), gpt_task(), mask);
  EXPECT_EQ(without.names.size() + 6, step.names.size());
}

// The weights of tokens sum to what the step divides by: tokens of the loss mask, or pairs.
TEST(RouterLosses, WeighAsMuchAsTheMainLoss) {
  constexpr double kLayers = 2;
  const auto expect_weights = [&](const LossesOfStep& step) {
    const double weight = step.main[1].item<double>();
    EXPECT_NEAR(step.of("load_balancing_loss")[1].item<double>(), 0.02 * kLayers * weight,
                1e-5 * weight);
    EXPECT_NEAR(step.of("z_loss")[1].item<double>(), 0.01 * kLayers * weight, 1e-5 * weight);
  };
  const LossesOfStep tokens = step_of(parse(kRouted + kRun, 1), gpt_task(), mask_of({16, 3}));
  EXPECT_EQ(tokens.main[1].item<double>(), 4 * 19);
  expect_weights(tokens);
  Arguments a = parse(kRouted + kRun, 1);
  a.training.task = "dpo";
  const LossesOfStep pairs = step_of(a, find_task("dpo", a), mask_of({16, 3}));
  EXPECT_EQ(pairs.main[1].item<double>(), 4);
  expect_weights(pairs);
}

// Every token has two choices in each layer, whichever rank or stage has the layer.
TEST(TokensPerExpert, AreThoseOfAllRanksAndStages) {
  const std::string flags = kRouted + kRun + "--mtp-num-layers 1 ";
  const Arguments a = parse(flags, 1);
  const std::vector<std::string> names = routers_of(a.transformer).names;
  EXPECT_EQ(names,
            (std::vector<std::string>{"decoder.layers.0.mlp.router", "decoder.layers.1.mlp.router",
                                      "mtp.layers.0.transformer_layer.mlp.router"}));
  constexpr int64_t kChoices = 8 * 16 * 2;  // of the samples of a step
  const at::Tensor mask = at::ones({2, 16});
  const auto expect_all = [&](const LossesOfStep& step) {
    EXPECT_TRUE(at::equal(step.tokens_per_expert.sum(1), at::full({3}, kChoices, at::kLong)));
  };
  expect_all(step_of(a, gpt_task(), mask));
  const Arguments divided = parse(flags + "--pipeline-model-parallel-size 2", 4);
  std::mutex mutex;
  run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(divided.parallel, world);
    const LossesOfStep step = step_of(divided, gpt_task(), mask, groups);
    const std::lock_guard lock(mutex);
    expect_all(step);
  });
}

// Three steps, or the first and the last of them: in the second one the logits of the first layer's
// router are not numbers.
struct StepsOfRank {
  std::vector<StepNumbers> numbers;
  std::vector<at::Tensor> values;  // of parameters and states, after the last
};
StepsOfRank steps_of_rank(const Arguments& a, const ParallelGroups& groups, bool with_nan) {
  const PretrainTask task = gpt_task();
  TrainedModel model =
      build_model(task, a, {500, 512}, groups, at::kFloat, c10::kCPU, StartPoint{});
  Timers timers(0);
  OutcomeReader reader(c10::kCPU);
  StepOptions options = step_options(a, 0);
  options.keeps_tokens_per_expert = true;
  const auto batch = [&] {
    Batch one = random_batch(a, groups);
    const at::Tensor text = at::arange(one["tokens"].numel()).view_as(one["tokens"]);
    one.set("tokens", (text * 37 + 11 * groups.dp.rank()).remainder(500));
    one.set("labels", (text * 53).remainder(500));
    one.totals = sequence_totals(one["loss_mask"], a.transformer.seq_length);
    return one;
  };
  Module& module = *model.chunks.front().module;
  StepsOfRank steps;
  const auto step = [&] {
    reader.push(train_step(model, task, options, batch, timers));
    EXPECT_TRUE(reader.pop(steps.numbers.emplace_back(), /*all=*/true));
  };
  step();
  if (with_nan) {
    at::Tensor router;
    module.visit([&](const std::string& name, Parameter& parameter) {
      if (name == "decoder.layers.0.mlp.router.weight") router = parameter.value;
    });
    const at::Tensor kept = router.clone();
    router.fill_(std::nan(""));
    step();
    router.copy_(kept);
  }
  step();
  module.visit([&](const std::string&, Parameter& p) { steps.values.push_back(p.value.clone()); });
  module.visit_state(
      [&](const std::string&, at::Tensor& state) { steps.values.push_back(state.clone()); });
  return steps;
}

// Every token still has k experts, rows travel and come back, and neither weights nor the bias of
// experts nor what the optimizer keeps move.
TEST(LogitsThatAreNoNumbers, RouteLegallyAndSkipTheStep) {
  const Arguments a =
      parse(kRouted + kRun +
                "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
                "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
            2);
  constexpr int64_t kChoices = 8 * 16 * 2;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(a.parallel, world);
    const StepsOfRank skipped = steps_of_rank(a, groups, true),
                      good = steps_of_rank(a, groups, false);
    const StepNumbers& bad = skipped.numbers[1];
    EXPECT_TRUE(std::isnan(bad.loss));
    EXPECT_EQ(bad.state.skip, 1);
    EXPECT_EQ(bad.state.num_skipped, 1);
    ASSERT_EQ(bad.tokens_per_expert.size(), 2);
    for (const std::vector<int64_t>& of_layer : bad.tokens_per_expert)
      EXPECT_EQ(std::accumulate(of_layer.begin(), of_layer.end(), int64_t{0}), kChoices);
    EXPECT_EQ(skipped.numbers[2].loss, good.numbers[1].loss);
    EXPECT_EQ(skipped.numbers[2].state.grad_norm, good.numbers[1].state.grad_norm);
    EXPECT_NE(good.numbers[1].loss, good.numbers[0].loss);
    ASSERT_EQ(skipped.values.size(), good.values.size());
    for (size_t i = 0; i < good.values.size(); ++i)
      EXPECT_TRUE(at::equal(skipped.values[i], good.values[i])) << "tensor " << i;
  });
}

TEST(RouterLosses, HalvesOfPairs) {
  const at::Tensor sums = at::tensor({3.0, 5.0, 0.0, 0.0, 0.0, 2.0}, at::kDouble);
  EXPECT_TRUE(
      at::equal(halves_of_pairs(sums), at::tensor({0.5, 0.5, 0.0, 0.0, 0.5, 0.5}, at::kDouble)));
}

}  // namespace
}  // namespace megatron
