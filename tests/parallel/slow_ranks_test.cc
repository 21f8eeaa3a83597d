// One slow rank of four is reported, with the section; equally fast ranks are not. Ranks are
// threads whose sections are waits of 50 ms, so that other load on the machine has little effect.
// MEGATRON_SLOW_RANK_TRIALS=60 and MEGATRON_SLOW_RANK_STEPS=1000 run longer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/rank_reports.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

constexpr const char* kRun =
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --tokenizer-type NullTokenizer "
    "--vocab-size 61 --mock-data --num-workers 0 --micro-batch-size 1 --train-samples 100000 --lr "
    "1e-3 --eval-iters 0 --device cpu "
    "--num-threads 1 --global-batch-size ";

constexpr double kSectionMs = 50;

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Slow {
  int rank = -1;
  int first_step = 0;
  std::vector<Section> sections;
};

struct Seen {
  std::vector<std::pair<int64_t, std::string>> lines;  // by step
  std::vector<SectionTimes> last;                      // of every rank
};

Seen train(const std::string& layout, int ranks, int steps, const Slow& slow) {
  const Arguments arguments = parse_run(cat(kRun, ranks, " ", layout), ranks);
  Seen seen;
  seen.last.resize(static_cast<size_t>(ranks));
  run_ranks(
      ranks,
      [&](const std::shared_ptr<Backend>& world) {
        const auto clock = std::make_shared<SectionClock>(at::kCPU);
        const ParallelGroups groups =
            make_parallel_groups(arguments.parallel, watch_waits(world, clock));
        const PretrainTask task = gpt_task();
        const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
        const TrainValidTestDatasets data = build_datasets(task, arguments, *tokenizer);
        TrainedModel model = build_model(task, arguments, vocabulary_of(arguments, *tokenizer),
                                         groups, at::kFloat, at::kCPU, StartPoint{});
        const std::unique_ptr<DataLoader> loader =
            make_train_loader(arguments, groups, data.train, 0, at::kCPU);
        BatchMaker batches(at::kCPU, groups.cp);
        OutcomeReader outcomes(at::kCPU);
        SlowRankWatch watch(groups, at::kCPU, /*interval=*/1);
        Timers timers(0);
        timers.set_sections(clock.get());
        int step = 0;
        std::array<bool, kNumSections> done{};  // in this step
        clock->set_delay([&](Section section) {
          if (section == Section::kNone || std::exchange(done[static_cast<size_t>(section)], true))
            return;
          const bool slower =
              world->rank() == slow.rank && step >= slow.first_step &&
              std::find(slow.sections.begin(), slow.sections.end(), section) != slow.sections.end();
          std::this_thread::sleep_for(
              std::chrono::duration<double, std::milli>(kSectionMs * (slower ? 1.2 : 1.0)));
        });
        for (step = 1; step <= steps; ++step) {
          outcomes.push(train_step(
              model, task, step_options(arguments, 0), [&] { return batches.make(loader->next()); },
              timers));
          done = {};
          StepNumbers numbers;
          outcomes.pop(numbers, /*all=*/true);
          EXPECT_EQ(numbers.times.size(), step == 1 ? 0u : static_cast<size_t>(ranks))
              << "every rank knows all ranks' times";
          if (world->rank() != 0) continue;
          for (const auto& [rank, times] : numbers.times)
            seen.last[static_cast<size_t>(rank)] = times;
          if (const auto line = watch.step(step, numbers)) seen.lines.emplace_back(step, *line);
        }
      },
      /*timeout_seconds=*/600);
  return seen;
}

TEST(SlowRankWatch, NamesTheSlowRankAndItsSection) {
  const int trials = number_from("MEGATRON_SLOW_RANK_TRIALS", 3);
  const std::vector<std::vector<Section>> kinds = {
      {Section::kForward, Section::kBackward}, {Section::kData}, {Section::kHost}};
  int named = 0;
  for (int trial = 0; trial < trials; ++trial) {
    constexpr int kFirst = 3;
    const Slow slow{(trial + trial / 3 + 1) % 4, kFirst,
                    kinds[static_cast<size_t>(trial) % kinds.size()]};
    const char* layout = trial % 6 < 3 ? "" : "--tensor-model-parallel-size 2";
    const Seen seen = train(layout, 4, kFirst + 20, slow);
    bool right = !seen.lines.empty();
    for (const auto& [step, line] : seen.lines) {
      bool fits = false;
      for (const Section section : slow.sections)
        fits = fits || line.find(cat("rank ", slow.rank, " is slow: its ", section_name(section),
                                     " takes ")) != std::string::npos;
      right = right && fits;
    }
    if (!right)
      std::printf("trial %d, rank %d: %s\n", trial, slow.rank,
                  seen.lines.empty() ? "nobody" : seen.lines.front().second.c_str());
    named += right;
  }
  std::printf("named %d of %d, within 20 steps\n", named, trials);
  EXPECT_GE(named, trials - trials / 20);
}

TEST(SlowRankWatch, NamesNobodyInEvenSteps) {
  const int steps = number_from("MEGATRON_SLOW_RANK_STEPS", 30);
  const Seen seen = train("", 4, steps, {});
  for (const auto& [step, line] : seen.lines) ADD_FAILURE() << "step " << step << ": " << line;
  // Every section took what it was made to take, and no rank waited for long.
  for (const SectionTimes& times : seen.last) {
    for (const Section section : {Section::kData, Section::kForward, Section::kBackward,
                                  Section::kOptimizer, Section::kHost}) {
      EXPECT_GE(times[static_cast<size_t>(section)], kSectionMs) << section_name(section);
      EXPECT_LT(times[static_cast<size_t>(section)], 10 * kSectionMs) << section_name(section);
    }
  }
}

// What peers wait for is communication, and no section of theirs.
TEST(SectionClock, WaitsAreCommunication) {
  run_ranks(2, [](const std::shared_ptr<Backend>& world) {
    SectionTimes times{};
    const auto clock = std::make_shared<SectionClock>(at::kCPU);
    const ProcessGroup group(watch_waits(world, clock), "world");
    const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    group.barrier();
    clock->begin_step();
    {
      const SectionScope forward(clock.get(), Section::kForward);
      if (group.rank() == 1) sleep(200);
      {
        const SectionScope data(clock.get(), Section::kData);
        sleep(20);
      }
      group.all_reduce(at::ones({3}))->wait();
      sleep(20);
    }
    clock->pause();
    sleep(50);  // an evaluation
    group.barrier();
    clock->resume();
    EXPECT_FALSE(clock->take()) << "the step has not ended";
    clock->begin_step();
    const std::optional<SectionTimes> taken = clock->take();
    ASSERT_TRUE(taken);
    EXPECT_FALSE(clock->take());
    times = *taken;
    const auto of = [&](Section section) { return times[static_cast<size_t>(section)]; };
    EXPECT_GE(of(Section::kData), 20);
    EXPECT_GE(of(Section::kForward), group.rank() == 1 ? 220 : 20);
    if (group.rank() == 0) {
      EXPECT_GE(of(Section::kCommunication), 100);
      EXPECT_LT(of(Section::kForward), 150);
    }
    EXPECT_LT(of(Section::kHost), 45) << "the evaluation is not counted";
  });
}

}  // namespace
}  // namespace megatron
