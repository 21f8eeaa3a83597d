// The runner on a GPU, whose decoding steps run as CUDA graphs: each sequence gets the tokens that
// it gets alone, by forwards over the whole of it on the CPU.
#include <gtest/gtest.h>

#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {
namespace {

const at::Device kServingGpu(at::kCUDA, 0);
constexpr DriverChances kMixedSchedules{
    .whole_prompts = 0.3, .preempt = 0.2, .share = 0.6, .pause = 0.2, .in_flight = 2};

std::vector<std::pair<std::string, ModelConfig>> captured_kinds() {
  std::vector<std::pair<std::string, ModelConfig>> kinds = {{"grouped", small_served_model()}};
  ModelConfig window = small_served_model();
  window.transformer.window_size = {5, 0};
  window.transformer.attn_logit_softcapping = 3.0;
  kinds.emplace_back("windows, capped", window);
  ModelConfig learned = small_served_model();
  learned.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  learned.transformer.max_position_embeddings = 32;
  kinds.emplace_back("learned positions", learned);
  ModelConfig normed = small_served_model();
  normed.transformer.qk_layernorm = true;
  kinds.emplace_back("norms of queries and keys", normed);
  kinds.emplace_back("latents", latent_served_model());
  return kinds;
}

TEST(ServedGpu, SequencesGetWhatTheyGetAloneInGraphs) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const ParallelGroups one;
  for (const auto& [name, config] : captured_kinds()) {
    Served on_cpu(Served::make(config, one));
    Served served(Served::make(config, one), {}, at::kDouble, kServingGpu);
    std::mt19937 random(7);
    const std::vector<DrivenSequence> given = random_sequences(random, 9);
    const std::vector<DrivenSequence> expected = all_alone(*on_cpu.model, given);
    for (uint32_t seed = 0; seed < 4; ++seed) {
      RunnerOptions options = small_runner(9 + 6 * static_cast<int32_t>(seed));
      if (seed < 3) options.graph_sizes = graph_sizes(seed == 0 ? -1 : 2, options.slots);
      ModelRunner runner(*served.model, *served.weights, options);
      PlanDriver driver(runner, kMixedSchedules, seed);
      std::vector<DrivenSequence> got = given;
      driver.run(got);
      expect_equal(got, expected, cat(name, ", seed ", seed));
      EXPECT_EQ(runner.graph_steps() > 0, seed < 3) << name;
    }
  }
}

// Weights move when they wait in host memory: what was captured reads their old places.
TEST(ServedGpu, GraphsAreCapturedAgainBehindATransition) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const ParallelGroups one;
  Served on_cpu(Served::make(small_served_model(), one));
  Served served(Served::make(small_served_model(), one), {}, at::kDouble, kServingGpu);
  std::mt19937 random(8);
  const std::vector<DrivenSequence> given = random_sequences(random, 12);
  const std::vector<DrivenSequence> expected = all_alone(*on_cpu.model, given);
  RunnerOptions options = small_runner(40);
  options.graph_sizes = {4};
  ModelRunner runner(*served.model, *served.weights, options);
  int64_t before = 0;
  at::Tensor other;
  DriverChances chances = kMixedSchedules;
  chances.in_flight = 1;
  PlanDriver driver(
      runner.facts(), chances, 1,
      [&](const StepPlan& plan) {
        if (before == 0 && runner.graph_steps() > 1) {
          before = runner.graph_steps();
          SuspendRunner suspend;
          suspend.levels.weights = suspend.levels.cache = MemoryLevel::kOffload;
          runner.begin(suspend);
          EXPECT_EQ(runner.poll(0), "");
          // What lay there is another one's now.
          other = at::full({1 << 20}, 1e30, at::dtype(at::kDouble).device(kServingGpu));
          runner.begin(ResumeRunner{});
          EXPECT_EQ(runner.poll(0), "");
        }
        runner.launch(plan);
      },
      [&] { return runner.take(int64_t{60'000'000'000}).value(); });
  std::vector<DrivenSequence> got = given;
  driver.run(got);
  expect_equal(got, expected, "suspended");
  EXPECT_GT(before, 0);
  EXPECT_GT(runner.graph_steps(), before);
}

}  // namespace
}  // namespace megatron
