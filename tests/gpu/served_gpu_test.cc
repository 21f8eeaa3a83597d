// The runner on a GPU, whose decoding steps run as CUDA graphs: each sequence gets the tokens that
// it gets alone, by forwards over the whole of it on the CPU.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "tests/gpu/timing.h"
#include "tests/kernels/cases.h"
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

// Rows of a graph that are too many have id 0, whose row of the table is NaN here: all that they
// compute is NaN, and no text has the id. (Their other numbers are written for each step.)
void spoil_idle_rows(Model& model) {
  model.visit([](const std::string& name, Parameter& parameter) {
    if (name.ends_with("word_embeddings.weight"))
      parameter.value.select(0, 0).fill_(std::numeric_limits<double>::quiet_NaN());
  });
}

std::vector<DrivenSequence> without_id_0(std::vector<DrivenSequence> sequences) {
  for (DrivenSequence& s : sequences) {
    std::ranges::replace(s.start.ids, 0, 3);
    s.start.sampling.forbidden = {0};
  }
  return sequences;
}

TEST(ServedGpu, SequencesGetWhatTheyGetAloneInGraphs) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const ParallelGroups one;
  for (auto& [name, config] : captured_kinds()) {
    config.transformer.untie_embeddings_and_output_weights = true;
    Served on_cpu(Served::make(config, one));
    Served served(Served::make(config, one), {}, at::kDouble, kServingGpu);
    for (Model* model : {on_cpu.model.get(), served.model.get()}) spoil_idle_rows(*model);
    std::mt19937 random(7);
    const std::vector<DrivenSequence> given = without_id_0(random_sequences(random, 9));
    EXPECT_TRUE(full_logits(*on_cpu.model, std::array{3, 0}).isnan().any().item<bool>()) << name;
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

// Chunks behind a cache and single tokens, from views of one tensor that are rotated on the way.
struct CachedShape {
  int64_t heads, groups, d, window;
  bool interleaved, fp8;
};

void PrintTo(const CachedShape& c, std::ostream* out) {
  *out << c.heads << "_" << c.groups << "_" << c.d << "_window" << c.window
       << (c.interleaved ? "_interleaved" : "") << (c.fp8 ? "_fp8" : "");
}

class ServedGpuCache : public testing::TestWithParam<std::tuple<CachedShape, at::ScalarType>> {};

TEST_P(ServedGpuCache, AttendsAsTheCpuDoesInFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto& [c, type] = GetParam();
  constexpr int64_t kBlock = 16, kBlocks = 40;
  const std::vector<std::vector<int32_t>> tables = {
      {7, 3, 11, 0}, {1, 30, 5, 9, 2, 8, 31, 12, 14, 17}, {20, 21, 22, 4, 6, 10, 13, 15, 16, 18}};
  const std::vector<std::vector<std::array<int64_t, 3>>> steps = {
      // sequence, first, count
      {{0, 0, 1}, {1, 0, 70}, {2, 0, 33}},
      {{0, 1, 1}, {1, 70, 1}, {2, 33, 40}},
      {{2, 73, 1}, {0, 2, 30}, {1, 71, 60}}};
  at::manual_seed(11);
  KVCache there, here;
  const int64_t r = c.heads / c.groups;
  const auto step = [&](const std::vector<std::array<int64_t, 3>>& parts, bool compare) {
    const auto rows_on = [&](at::Device device) {
      std::vector<RaggedPart> ragged;
      for (const auto& [sequence, first, count] : parts)
        ragged.push_back({first, count, tables[static_cast<size_t>(sequence)]});
      return PagedRows(std::move(ragged), kBlocks, kBlock, device);
    };
    const PagedRows rows = rows_on(at::kCPU);
    const int64_t t = rows.rows();
    const at::Tensor mixed = at::randn({t, c.groups, r + 2, c.d}).to(type);
    const at::Tensor angles = at::randn({t, 1, c.d / 2});
    const auto added = [&](const at::Tensor& all, const at::Tensor& angle) {
      return AddedRows{all.narrow(2, 0, r),
                       all.select(2, r),
                       all.select(2, r + 1),
                       {angle.cos(), angle.sin(), c.interleaved}};
    };
    AttentionOptions options;
    options.scale = 0.4 / std::sqrt(static_cast<double>(c.d));
    options.window_left = c.window;
    const at::Tensor exact =
        here.attend(added(mixed.to(at::kDouble), angles.to(at::kDouble)), rows, options);
    const at::Tensor got = there.attend(added(mixed.to(kServingGpu), angles.to(kServingGpu)),
                                        rows_on(kServingGpu), options);
    if (!compare) return;
    const double limit = c.fp8 ? 0.08 : type == at::kHalf ? 3e-3 : 2e-2;
    EXPECT_LT(relative_error(got.cpu(), exact), limit);
  };
  if (c.fp8) {
    for (PagedBuffer* buffer : there.paged()) buffer->measure();
    step(steps.front(), false);
    for (PagedBuffer* buffer : there.paged()) buffer->quantize(2.0);
  }
  for (const auto& parts : steps) step(parts, true);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ServedGpuCache,
                         testing::Combine(testing::Values(CachedShape{8, 2, 128, -1, false, false},
                                                          CachedShape{6, 6, 64, 20, true, false},
                                                          CachedShape{20, 1, 96, 64, false, false},
                                                          CachedShape{4, 4, 256, -1, true, false},
                                                          CachedShape{8, 2, 128, 30, false, true},
                                                          CachedShape{4, 2, 64, -1, true, true}),
                                          testing::Values(at::kBFloat16, at::kHalf)));

// Long prompts that begin in a step, behind one that goes on and beside a token that is decoded:
// three of cuDNN's four samples.
TEST(ServedGpu, WholePromptsAttendAsOnTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  constexpr int64_t kBlock = 64, kGroups = 2, kOfGroup = 3, kSize = 128, kBefore = 300;
  const std::vector<std::pair<int64_t, int64_t>> firsts_and_counts = {
      {0, 1}, {kBefore, 410}, {0, 700}, {0, 1300}, {0, 513}};
  std::vector<RaggedPart> parts, before;
  int32_t blocks = 0;
  for (const auto& [first, count] : firsts_and_counts) {
    RaggedPart& part = parts.emplace_back();
    part.first = first;
    part.count = count;
    for (int64_t i = 0; i * kBlock < first + count; ++i) part.blocks.push_back(blocks++);
  }
  before.push_back(parts[1]);
  before.front().first = 0;
  before.front().count = kBefore;
  AttentionOptions options;
  options.scale = 1.0 / std::sqrt(static_cast<double>(kSize));
  const auto attended = [&](at::Device device, at::ScalarType type) {
    at::manual_seed(12);
    KVCache cache;
    at::Tensor out;
    for (const std::vector<RaggedPart>& step : {before, parts}) {
      const PagedRows rows(step, blocks, kBlock, device);
      const at::Tensor all =
          at::randn({rows.rows(), kGroups, kOfGroup + 2, kSize}).to(at::kBFloat16).to(device, type);
      out = cache.attend(
          {all.narrow(2, 0, kOfGroup), all.select(2, kOfGroup), all.select(2, kOfGroup + 1)}, rows,
          options);
    }
    return out.cpu();
  };
  const at::Tensor got = attended(kServingGpu, at::kBFloat16),
                   exact = attended(at::kCPU, at::kFloat);
  for (int64_t part = 0, first = 0; part < std::ssize(parts); ++part) {
    const int64_t count = parts[static_cast<size_t>(part)].count;
    EXPECT_LT(relative_error(got.narrow(0, first, count), exact.narrow(0, first, count)), 1e-2)
        << "part " << part;
    first += count;
  }
}

// Of keys and values, whose copy rate decoding should reach; 8 heads of 128 features for 32 of
// queries, positions of each sequence around 1,100.
TEST(ServedGpu, RatesOfDecodingAttention) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  constexpr int64_t kBlock = 64, kMost = 1400 / kBlock + 1;
  const at::Tensor pattern =
      at::randn({int64_t{64} << 20}, at::dtype(at::kHalf).device(kServingGpu));
  const at::Tensor copy = at::empty_like(pattern);
  std::printf("a copy %.0f GB/s\n", 4.0 * static_cast<double>(pattern.numel()) * 1e-6 /
                                        milliseconds(pattern, {[&] { copy.copy_(pattern); }})[0]);
  for (const auto& [sequences, codes] : {std::pair{256, false}, {256, true}, {768, true}}) {
    std::vector<RaggedPart> parts;
    double positions = 0;
    for (int64_t i = 0; i < sequences; ++i) {
      RaggedPart& part = parts.emplace_back();
      part.first = 800 + i * 37 % 600;
      part.count = 1;
      for (int64_t j = 0; j < kMost; ++j)
        part.blocks.push_back(static_cast<int32_t>(j * sequences + (i * 7 + j) % sequences));
      positions += static_cast<double>(part.first + 1);
    }
    const PagedRows rows(std::move(parts), kMost * sequences, kBlock, kServingGpu);
    const auto pool = [&] {
      const at::Tensor x = at::randn({kMost * sequences, kBlock, 8, 128},
                                     at::dtype(at::kBFloat16).device(kServingGpu));
      if (!codes) return PagedView{x};
      return PagedView{x.to(at::kFloat8_e4m3fn).view(at::kByte),
                       at::ones({8}, at::dtype(at::kFloat).device(kServingGpu))};
    };
    const PagedView keys = pool(), values = pool();
    const at::Tensor q =
        at::randn({sequences, 32, 128}, at::dtype(at::kBFloat16).device(kServingGpu));
    AttentionOptions options;
    options.scale = 0.088;
    const double ms =
        milliseconds(q, {[&] { paged_attention(q, keys, values, rows, options); }})[0];
    std::printf("%d sequences in %s: %.3f ms, %.0f GB/s\n", sequences, codes ? "E4M3" : "bf16", ms,
                positions * 8 * 128 * (codes ? 2 : 4) * 1e-6 / ms);
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

// Steps of any number of rows find graphs and kernels that were chosen before the first of them.
// How often the driver was asked for memory.
int64_t device_allocations() {
  return c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(0).num_device_alloc;
}

TEST(ServedGpu, HeldMemoryServesTensorsOfAllSizes) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
  hold_memory(kServingGpu, int64_t{100} << 20);
  const int64_t before = device_allocations();
  const at::TensorOptions bytes = at::dtype(at::kByte).device(kServingGpu);
  std::vector<at::Tensor> kept;
  for (const int64_t mib : {1, 30, 12, 40, 3}) kept.push_back(at::empty({mib << 20}, bytes));
  for (int i = 0; i < 100; ++i) kept.push_back(at::empty({100 + i}, bytes));
  EXPECT_EQ(device_allocations(), before);
  kept.push_back(at::empty({int64_t{100} << 20}, bytes));
  EXPECT_EQ(device_allocations(), before + 1);
}

TEST(ServedGpu, AfterWarmingUpNoStepChoosesKernelsCapturesOrAllocates) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const ParallelGroups one;
  for (const bool warm : {true, false}) {
    ModelConfig config = small_served_model();
    config.transformer.hidden_size = 512;
    if (!warm) config.transformer.ffn_hidden_size += 64;  // products that nobody has seen
    Served served(Served::make(config, one), {}, at::kBFloat16, kServingGpu);
    std::mt19937 random(7);
    std::vector<DrivenSequence> sequences = random_sequences(random, 9);
    for (DrivenSequence& s : sequences) s.start.log_probabilities = {};  // of prompts, of many rows
    RunnerOptions options = small_runner(30);
    options.graph_sizes = graph_sizes(-1, options.slots);
    ModelRunner runner(*served.model, *served.weights, options);
    if (warm) {
      runner.plan_warm_up(2 * 64);
      int pieces = 0;
      while (runner.warm_up_some()) ++pieces;
      EXPECT_GT(pieces, static_cast<int>(options.graph_sizes.size()));
    }
    const int64_t before = gemm_choices(), allocated = device_allocations();
    PlanDriver driver(runner, kMixedSchedules, 1);
    driver.run(sequences);
    EXPECT_GT(runner.graph_steps(), 0);
    EXPECT_EQ(gemm_choices() > before, !warm);
    if (warm) {
      EXPECT_EQ(device_allocations(), allocated);
    }
  }
}

}  // namespace
}  // namespace megatron
