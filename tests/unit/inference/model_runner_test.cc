// The runner under schedules of many kinds: each sequence gets the tokens that it gets alone, by
// forwards over the whole of it without a cache.
#include "megatron/inference/model_runner.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/generator.h"
#include "megatron/scheduling/token_grammar.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/served_models.h"
#include "tests/unit/inference/toy_model.h"

namespace megatron {
namespace {

constexpr DriverChances kMixed{.whole_prompts = 0.3, .preempt = 0.3, .share = 0.8, .pause = 0.2};

TEST(ModelRunner, EverySequenceGetsWhatItGetsAlone) {
  const ParallelGroups one;
  Served served(Served::make(small_served_model(), one));
  std::mt19937 random(3);
  const std::vector<DrivenSequence> given = random_sequences(random, 9);
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  int64_t swaps = 0, shared = 0, drafted = 0, accepted = 0;
  for (uint32_t seed = 0; seed < 24; ++seed) {
    // From a pool for one sequence to one for all.
    ModelRunner runner(*served.model, *served.weights,
                       small_runner(7 + 4 * static_cast<int32_t>(seed % 5)));
    DriverChances chances = kMixed;
    if (seed == 0) chances = {.whole_prompts = 1.0};
    chances.in_flight = 1 + seed % 3;
    if (seed >= 12) chances.drafts = &expected;
    PlanDriver driver(runner, chances, seed);
    std::vector<DrivenSequence> got = given;
    driver.run(got);
    expect_equal(got, expected, cat("seed ", seed));
    swaps += driver.swaps();
    shared += driver.shared();
    drafted += driver.drafted();
    accepted += driver.accepted();
  }
  EXPECT_GT(swaps, 10);
  EXPECT_GT(shared, 10);
  EXPECT_GT(accepted, 40);
  EXPECT_GT(drafted - accepted, 10);
}

std::vector<std::pair<std::string, ModelConfig>> kinds() {
  std::vector<std::pair<std::string, ModelConfig>> kinds;
  ModelConfig learned = small_served_model();
  learned.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  learned.transformer.max_position_embeddings = 32;
  kinds.emplace_back("learned positions", learned);
  ModelConfig window = small_served_model();
  window.transformer.window_size = {5, 0};
  kinds.emplace_back("windows in all layers", window);
  window.transformer.window_attn_skip_freq = "2";
  window.transformer.attn_logit_softcapping = 3.0;
  window.transformer.final_logit_softcapping = 5.0;
  kinds.emplace_back("a window in one layer, capped", window);
  kinds.emplace_back("latents", latent_served_model());
  ModelConfig longrope = small_served_model();
  longrope.transformer.rope_scaling_type = RopeScaling::kLongRope;
  longrope.transformer.rope_original_max_position_embeddings = 15;
  longrope.transformer.longrope_short_factor.assign(4, 1.0);
  longrope.transformer.longrope_long_factor = {2.0, 3.0, 4.0, 5.0};
  kinds.emplace_back("longrope", longrope);
  ModelConfig experts = small_served_model();
  experts.transformer.num_experts = 4;
  experts.transformer.moe_router_topk = 2;
  experts.transformer.moe_router_pre_softmax = true;
  kinds.emplace_back("experts", experts);
  for (const char* pattern : {"M-", "G-", "M-*-GM"})
    kinds.emplace_back(cat("pattern ", pattern), hybrid_served_model(pattern));
  return kinds;
}

TEST(ModelRunner, ServesEveryKindOfModel) {
  for (const auto& [name, config] : kinds()) {
    const ParallelGroups one;
    Served served(Served::make(config, one));
    std::mt19937 random(4);
    const std::vector<DrivenSequence> given = random_sequences(random, 6);
    const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
    for (uint32_t seed = 0; seed < 3; ++seed) {
      RunnerOptions options = small_runner(14);
      options.keeping.drafts = seed > 0 ? 4 : 0;
      ModelRunner runner(*served.model, *served.weights, options);
      EXPECT_EQ(runner.facts().window, name == "windows in all layers" ? 6 : 0);
      EXPECT_EQ(runner.facts().max_positions, name == "learned positions" ? 32 : 0);
      const bool hybrid = config.transformer.is_hybrid();
      EXPECT_EQ(runner.facts().owns_state, hybrid);
      DriverChances chances = kMixed;
      if (hybrid) chances.share = 0.0;
      if (seed > 0) chances.drafts = &expected;
      PlanDriver driver(runner, chances, seed);
      std::vector<DrivenSequence> got = given;
      driver.run(got);
      expect_equal(got, expected, cat(name, ", seed ", seed));
      EXPECT_EQ(driver.dropped() > 0, runner.facts().window > 0) << name;
      EXPECT_EQ(driver.crossed() > 0, name == "longrope") << name;
    }
  }
}

// States of fixed size move with their sequence, and prompts begin with given rows.
TEST(ModelRunner, SequencesOwnStatesAndBringRows) {
  const ParallelGroups one;
  Served served(make_toy_model(one));
  std::mt19937 random(5);
  std::vector<DrivenSequence> given = random_sequences(random, 7), expected;
  std::uniform_real_distribution<float> value(-1, 1);
  for (size_t i = 0; i < given.size(); ++i) {
    SlotStart& start = given[i].start;
    StateInput input{random_ids(random, static_cast<int64_t>(i % 3)), {2, 16}, {}};
    for (int j = 0; j < 32; ++j) input.values.push_back(value(random));
    start.state_input = std::make_shared<StateInput>(input);
    at::Tensor rows;
    if (i % 2 == 0) {
      GivenRows given_rows{static_cast<int64_t>(i % 5) + 1, 16, {}};
      for (int64_t j = 0; j < given_rows.count * 16; ++j)
        given_rows.values.push_back(value(random));
      rows = at::tensor(given_rows.values).view({-1, 16}).to(at::kDouble);
      start.rows = std::make_shared<GivenRows>(std::move(given_rows));
      if (i == 4) start.ids.clear();
    }
    const std::vector<int64_t> ids(input.ids.begin(), input.ids.end());
    const SequenceInput whole{at::tensor(ids, at::kLong), at::tensor(input.values).view({2, 16})};
    expected.push_back(alone(given[i], [&](const std::vector<int32_t>& known) {
      return toy_logits(*served.model, whole, rows, known).narrow(1, 0, kToyVocab);
    }));
  }
  int64_t swaps = 0;
  for (uint32_t seed = 0; seed < 8; ++seed) {
    RunnerOptions options = small_runner(16);
    options.keeping.drafts = 3;
    ModelRunner runner(*served.model, *served.weights, options);
    EXPECT_TRUE(runner.facts().owns_state);
    EXPECT_EQ(runner.facts().state_drafts, 0) << "of a state that takes nothing back";
    EXPECT_TRUE(runner.facts().takes_state_input && runner.facts().needs_state_input);
    EXPECT_EQ(runner.facts().hidden_size, 16);
    DriverChances chances = kMixed;
    chances.share = 0.0;
    chances.in_flight = 1 + seed % 2;
    PlanDriver driver(runner, chances, seed);
    std::vector<DrivenSequence> got = given;
    driver.run(got);
    expect_equal(got, expected, cat("seed ", seed));
    swaps += driver.swaps();
  }
  EXPECT_GT(swaps, 4);
}

// A mask says which ids a sequence may draw; others beside it are free.
TEST(ModelRunner, DrawsAmongTheIdsOfAMask) {
  const ParallelGroups one;
  Served served(Served::make(small_served_model(), one));
  ModelRunner runner(*served.model, *served.weights, small_runner(8));
  constexpr auto kWords = static_cast<size_t>(token_mask_words(kToyVocab));
  const std::vector<int32_t> ids = {3, 4}, allowed = {17, -1, 5};
  StepPlan plan;
  plan.step = 1;
  for (int32_t slot = 0; slot < 3; ++slot) {
    SlotStart start;
    start.slot = slot;
    start.ids = ids;
    start.prompt_length = 2;
    start.sampling.temperature = 0.0;
    plan.starts.push_back(start);
    plan.blocks.push_back({slot, 0, {slot}});
    PlanPart part;
    part.slot = slot;
    part.count = 2;
    part.known = 2;
    part.draws = true;
    plan.tokens.insert(plan.tokens.end(), ids.begin(), ids.end());
    if (const int32_t id = allowed[static_cast<size_t>(slot)]; id >= 0) {
      part.masked = true;
      plan.masks.resize(plan.masks.size() + kWords);
      plan.masks[plan.masks.size() - kWords + static_cast<size_t>(id / 32)] = 1u << (id % 32);
    }
    plan.parts.push_back(part);
  }
  runner.launch(plan);
  const auto result = runner.take(int64_t{60'000'000'000});
  ASSERT_TRUE(result && result->draws.size() == 3);
  EXPECT_EQ(result->draws[0].id, 17);
  EXPECT_EQ(result->draws[1].id, full_logits(*served.model, ids)[1].argmax().item<int64_t>());
  EXPECT_EQ(result->draws[2].id, 5);
}

// Rows whose logits are not finite fail alone.
TEST(ModelRunner, LogitsThatAreNotFiniteFailTheirSequenceAlone) {
  const ParallelGroups one;
  Served served(make_toy_model(one));
  std::vector<DrivenSequence> given(2);
  for (size_t i = 0; i < 2; ++i) {
    given[i].start.ids = {1, 2, 3};
    given[i].tokens = 3;
    given[i].start.state_input = std::make_shared<StateInput>(
        StateInput{{}, {1, 16}, std::vector<float>(16, i == 0 ? 0.5f : NAN)});
  }
  ModelRunner runner(*served.model, *served.weights, small_runner(16));
  PlanDriver(runner, {.whole_prompts = 1.0}, 1).run(given);
  for (size_t i = 0; i < 2; ++i)
    for (const DrawnToken& drawn : given[i].drawn) EXPECT_EQ(drawn.finite, i == 0);
}

// An FP8 cache changes numbers a little, and the same way under every schedule.
TEST(ModelRunner, AnFp8CacheDoesNotDependOnTheSchedule) {
  std::vector<std::pair<std::string, ModelConfig>> models = {{"grouped", small_served_model()}};
  for (auto& [name, config] : kinds())
    if (name == "latents") models.emplace_back(name, config);
  for (auto& [name, config] : models) {
    config.transformer.init_method_std = 0.15;
    const ParallelGroups one;
    Served served(Served::make(config, one));
    std::mt19937 random(7);
    std::vector<DrivenSequence> given = random_sequences(random, 6);
    for (DrivenSequence& s : given) s.start.log_probabilities = {.output_top = 0, .prompt_top = 1};
    const std::vector<DrivenSequence> exact = all_alone(*served.model, given);
    RunnerOptions options = small_runner(20);
    options.fp8_cache = true;
    EXPECT_EQ(error_of([&] { ModelRunner(*served.model, *served.weights, options); }),
              "an FP8 cache needs ids to calibrate its scales with");
    options.calibration = random_ids(random, 40);
    std::vector<DrivenSequence> first;
    for (uint32_t seed = 0; seed < 4; ++seed) {
      ModelRunner runner(*served.model, *served.weights, options);
      if (seed == 0) {
        ModelRunner wide(*served.model, *served.weights, small_runner(20));
        EXPECT_EQ(runner.cache_bytes() * 8, wide.cache_bytes()) << "fp64";
      }
      std::vector<DrivenSequence> got = given;
      PlanDriver(runner, seed == 0 ? DriverChances{.whole_prompts = 1.0} : kMixed, seed).run(got);
      if (seed == 0) {
        first = got;
        double off = 0.0;
        for (size_t i = 0; i < got.size(); ++i)
          for (size_t j = 0; j < got[i].scores.size(); ++j)
            off = std::max(off, std::abs(double(got[i].scores[j].chosen.log_probability) -
                                         exact[i].scores[j].chosen.log_probability));
        EXPECT_GT(off, 1e-4) << name;
        EXPECT_LT(off, 0.1) << name;
      } else {
        expect_equal(got, first, cat(name, ", seed ", seed));
      }
    }
  }
}

// Between two steps the cache and the weights leave the device and come back.
void expect_suspended_between_steps(const ModelConfig& config) {
  const ParallelGroups one;
  Served served(Served::make(config, one), [config](const std::string&) {
    const ParallelGroups alone;
    Served again(Served::make(config, alone));
    std::vector<at::Tensor> values;
    for (Parameter* parameter : again.model->parameters()) values.push_back(parameter->value);
    return values;
  });
  std::mt19937 random(8);
  const std::vector<DrivenSequence> given = random_sequences(random, 4);
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  DriverChances chances = kMixed;
  if (config.transformer.is_hybrid()) chances.share = 0.0;
  const auto transit = [](StepRunner& runner, const RunnerTransition& transition) {
    runner.begin(transition);
    std::optional<std::string> outcome;
    while (!(outcome = runner.poll(1'000'000))) {
    }
    return *outcome;
  };
  for (const MemoryLevel cache : {MemoryLevel::kKeep, MemoryLevel::kOffload})
    for (const MemoryLevel weights :
         {MemoryLevel::kKeep, MemoryLevel::kOffload, MemoryLevel::kDrop}) {
      ModelRunner runner(*served.model, *served.weights, small_runner(20));
      const int64_t bytes = runner.cache_bytes();
      int64_t steps = 0;
      PlanDriver driver(
          runner.facts(), chances, 3,
          [&](const StepPlan& plan) {
            if (++steps % 4 == 0) {
              EXPECT_EQ(transit(runner, SuspendRunner{{cache, weights}}), "");
              EXPECT_EQ(runner.cache_bytes(), cache == MemoryLevel::kKeep ? bytes : 0);
              EXPECT_EQ(transit(runner, ResumeRunner{}), "");
              EXPECT_EQ(runner.cache_bytes(), bytes);
            }
            runner.launch(plan);
          },
          [&] { return *runner.take(int64_t{60'000'000'000}); });
      std::vector<DrivenSequence> got = given;
      driver.run(got);
      EXPECT_GT(steps, 8);
      expect_equal(got, expected, "suspended");
    }
  ModelRunner runner(*served.model, *served.weights, small_runner(20));
  EXPECT_EQ(transit(runner, SuspendRunner{{MemoryLevel::kDrop, MemoryLevel::kKeep}}), "");
  EXPECT_EQ(transit(runner, ResumeRunner{}), "");
  std::vector<DrivenSequence> got = given;
  PlanDriver(runner, chances, 4).run(got);
  expect_equal(got, expected, "from an empty cache");
  EXPECT_EQ(transit(runner, StageWeights{"other"}), "");
  EXPECT_EQ(transit(runner, CommitWeights{4}), "");
  EXPECT_EQ(runner.facts().weights_version, 4);
  EXPECT_EQ(transit(runner, CommitWeights{5}),
            "no weights were read to be exchanged for the current ones");
  EXPECT_EQ(transit(runner, DiscardWeights{}), "");

  ModelRunner fixed(*served.model, small_runner(20));
  const std::string refused = "the weights of this runner stay as they are";
  EXPECT_EQ(transit(fixed, SuspendRunner{{MemoryLevel::kDrop, MemoryLevel::kOffload}}), refused);
  EXPECT_EQ(transit(fixed, StageWeights{"other"}), refused);
  EXPECT_EQ(transit(fixed, CommitWeights{1}), refused);
  EXPECT_EQ(transit(fixed, DiscardWeights{}), "");
  EXPECT_EQ(transit(fixed, SuspendRunner{{MemoryLevel::kDrop, MemoryLevel::kKeep}}), "");
  EXPECT_EQ(transit(fixed, ResumeRunner{}), "");
}

TEST(ModelRunner, IsSuspendedBetweenTwoSteps) {
  expect_suspended_between_steps(small_served_model());
  expect_suspended_between_steps(hybrid_served_model("MG*"));
}

// Ranks as threads. Returns the number of steps whose rows tensor ranks divided.
int64_t run_over(int tensor, int pipeline, const ModelConfig& config, const DriverChances& chances,
                 uint32_t seed, std::vector<DrivenSequence>& sequences,
                 at::ScalarType type = at::kDouble,
                 const RunnerOptions& options = small_runner(16)) {
  int64_t divided = 0;
  run_ranks(tensor * pipeline, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    parallel.pipeline_model_parallel_size = pipeline;
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    Served served(Served::make(config, groups), {}, type);
    ModelRunner runner(*served.model, *served.weights, options);
    EXPECT_EQ(runner.facts().draw_latency, pipeline);
    std::vector<DrivenSequence> others = sequences;
    drive_ranks(groups.world, runner, chances, seed, world->rank() == 0 ? sequences : others);
    if (world->rank() == 0) divided = runner.divided_steps();
  });
  return divided;
}

TEST(ModelRunner, RanksServeWhatOneRankServes) {
  ModelConfig config = small_served_model();
  config.transformer.num_layers = 4;
  config.transformer.num_query_groups = 4;
  const ParallelGroups one;
  Served served(Served::make(config, one));
  std::mt19937 random(6);
  const std::vector<DrivenSequence> given = random_sequences(random, 7);
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  uint32_t seed = 0;
  for (const auto& [tensor, pipeline] :
       std::vector<std::pair<int, int>>{{2, 1}, {4, 1}, {1, 2}, {1, 4}, {2, 2}})
    for (const int64_t in_flight : {int64_t{1}, int64_t{1 + pipeline}}) {
      DriverChances chances = kMixed;
      chances.in_flight = in_flight;
      if (seed % 3 > 0) chances.drafts = &expected;
      std::vector<DrivenSequence> got = given;
      const int64_t divided = run_over(tensor, pipeline, config, chances, seed++, got);
      expect_equal(got, expected,
                   cat("tp ", tensor, " pp ", pipeline, ", ", in_flight, " in flight"));
      if (tensor < 4) {  // of four ranks few steps have enough rows
        EXPECT_EQ(divided > 0, tensor == 2);
      }
    }
}

// Norms behind sublayers, biases, two sublayers of one input; linears whose rows have scales of
// their own, which are exchanged as codes, and those whose blocks or tensors have them.
TEST(ModelRunner, StepsWhoseRowsAreDividedGiveWhatOthersGive) {
  ModelConfig plain = small_served_model();
  plain.transformer.hidden_size = 64;
  plain.transformer.num_query_groups = 4;
  std::vector<std::pair<std::string, ModelConfig>> all;
  all.emplace_back("biases", plain).second.transformer.add_bias_linear = true;
  all.back().second.transformer.normalization = Normalization::kLayerNorm;
  all.emplace_back("sandwich", plain).second.transformer.norm_placement = NormPlacement::kSandwich;
  all.emplace_back("parallel", plain).second.transformer.parallel_residual = true;
  for (const Fp8Recipe recipe :
       {Fp8Recipe::kTensorwise, Fp8Recipe::kDelayed, Fp8Recipe::kBlockwise})
    for (const bool bias : {false, true}) {
      TransformerConfig& t =
          all.emplace_back(cat("FP8 ", static_cast<int>(recipe), bias), plain).second.transformer;
      t.hidden_size = 256;
      t.ffn_hidden_size = 512;
      t.kv_channels = 128;
      t.fp8_format = Fp8Format::kE4M3;
      t.fp8_recipe = recipe;
      t.init_method_std = 0.1;
      t.add_bias_linear = bias;
    }
  std::mt19937 random(8);
  const std::vector<DrivenSequence> given = random_sequences(random, 6, 40);
  for (const auto& [name, config] : all)
    for (const int tensor : {2, 4}) {
      RunnerOptions options = small_runner(40);
      std::vector<DrivenSequence> got = given, expected = given;
      const DriverChances chances{.whole_prompts = 0.6, .in_flight = 2};
      const int64_t divided = run_over(tensor, 1, config, chances, 3, got, at::kFloat, options);
      EXPECT_EQ(divided > 0, config.transformer.can_divide_rows()) << name << ": " << divided;
      options.most_rows = 0;
      EXPECT_EQ(run_over(tensor, 1, config, chances, 3, expected, at::kFloat, options), 0);
      expect_equal(got, expected, cat(name, " over ", tensor));
    }
}

// A sequence's states go with it when it is swapped out, and are computed again when it is not,
// also by decoding that keeps the rows of its open chunk.
TEST(ModelRunner, StatesOfPatternsMoveWithTheirSequence) {
  const ParallelGroups one;
  Served served(Served::make(hybrid_served_model("MG*-M"), one));
  std::mt19937 random(9);
  const std::vector<DrivenSequence> given = random_sequences(random, 9);
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  int64_t swaps = 0;
  for (uint32_t seed = 0; seed < 12; ++seed) {
    RunnerOptions options = small_runner(7 + 4 * static_cast<int32_t>(seed % 5));
    options.keeping.replays_chunks = seed % 2 == 1;
    ModelRunner runner(*served.model, *served.weights, options);
    DriverChances chances = kMixed;
    chances.share = 0.0;
    chances.in_flight = 1 + seed % 3;
    PlanDriver driver(runner, chances, seed);
    std::vector<DrivenSequence> got = given;
    driver.run(got);
    expect_equal(got, expected, cat("seed ", seed));
    swaps += driver.swaps();
  }
  EXPECT_GT(swaps, 5);
}

// Groups of Mamba-2 that lie whole on a rank or on several, and stages of unequal depth.
TEST(ModelRunner, RanksServePatterns) {
  ModelConfig config = hybrid_served_model("M-G*M|M-");
  config.transformer.linear_num_key_heads = config.transformer.linear_num_value_heads = 4;
  config.transformer.num_query_groups = 4;
  const ParallelGroups one;
  Served served(Served::make(config, one));
  std::mt19937 random(6);
  const std::vector<DrivenSequence> given = random_sequences(random, 6);
  const std::vector<DrivenSequence> expected = all_alone(*served.model, given);
  uint32_t seed = 0;
  for (const auto& [tensor, pipeline] :
       std::vector<std::pair<int, int>>{{2, 1}, {4, 1}, {1, 2}, {1, 3}, {2, 2}}) {
    DriverChances chances = kMixed;
    chances.share = 0.0;
    chances.in_flight = 1 + seed % 2;
    std::vector<DrivenSequence> got = given;
    run_over(tensor, pipeline, config, chances, seed++, got);
    expect_equal(got, expected, cat("tp ", tensor, " pp ", pipeline));
  }
}

}  // namespace
}  // namespace megatron
