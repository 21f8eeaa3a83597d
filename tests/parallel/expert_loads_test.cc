// Models with experts under loads that are far from even, on four ranks as threads: what one rank
// computes, in the memory that rounds allow, and with the same bits in every run.
//
// MEGATRON_MATRIX=whole (`make matrix`): every layout, the choices that a router has learned from
// text in 100 steps, and 1,000 steps of a router that collapses (20 in `make test`).
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <numeric>
#include <string_view>

#include "against_one_rank.h"
#include "layout_flags.h"
#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/moe/routing_replay.h"
#include "tests/unit/allocation_meter.h"

namespace megatron {
namespace {

constexpr int64_t kExperts = 8, kTopk = 2, kRanks = 4, kLayers = 2, kLength = 16;
constexpr int64_t kMicroBatch = 2, kBatch = 16;
constexpr const char* kModel =
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 16 --seq-length 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 8 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --vocab-size 101 --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --micro-batch-size 2 --global-batch-size 16 --train-iters 1000 --lr 1e-2 "
    "--adam-eps 1e-3 --init-method-std 0.2 --eval-iters 0 --device cpu ";

bool whole_matrix() {
  const char* wanted = std::getenv("MEGATRON_MATRIX");
  return wanted != nullptr && std::string_view(wanted) == "whole";
}

enum Load { kEven, kZipf, kOneExpert, kOneRank, kIdleRank, kIdleExperts, kWanderingRank, kLoads };
constexpr const char* kNames[] = {"Even",     "Zipf",        "OneExpert",    "OneRank",
                                  "IdleRank", "IdleExperts", "WanderingRank"};

// Two experts for each of the tokens of a sample, [kLength, kTopk] int32.
at::Tensor choices_of(Load load, int64_t sample) {
  const int64_t per_rank = kExperts / kRanks;
  const at::Tensor token = at::arange(kLength, at::kLong) + sample * kLength;
  const auto two_of = [&](int64_t first, int64_t count) {  // in turn
    const at::Tensor one = token.remainder(count);
    return at::stack({one, (one + 1).remainder(count)}, 1) + first;
  };
  const auto pair = [&] {
    switch (load) {
      case kZipf: {
        const at::Tensor frequency = 1.0 / at::arange(1, kExperts + 1, at::kDouble);
        const at::Tensor draws = at::rand({kLength, kExperts}, at::kDouble);
        return std::get<1>((frequency / -draws.log()).topk(kTopk, 1));
      }
      case kOneExpert:
        return at::stack({at::full({kLength}, 3, at::kLong), token.remainder(3)}, 1);
      case kOneRank:
        return two_of(2 * per_rank, per_rank);
      case kIdleRank:
        return two_of(per_rank, kExperts - per_rank);
      case kIdleExperts:
        return two_of(3, kExperts / 4);
      case kWanderingRank:
        return two_of(sample / kMicroBatch % kRanks * per_rank, per_rank);
      default:
        return two_of(0, kExperts);
    }
  };
  return pair().to(at::kInt);
}

void record(RoutingTable& table, Load load, int64_t samples) {
  at::manual_seed(5);
  for (int64_t layer = 1; layer <= kLayers; ++layer)
    for (int64_t sample = 0; sample < samples; ++sample)
      table.record(layer, {at::full({1}, sample, at::kLong), at::arange(kLength, at::kLong)},
                   choices_of(load, sample));
}

struct Layout {
  const char* name;
  const char* flags;
  bool always = true;  // part of `make test`
};

constexpr Layout kLayouts[] = {
    {"ep4", EP "4 " A2A, false},
    {"ep4_rounds", EP "4 " A2A ROUNDS},
    {"ep4_allgather_rounds", EP "4 --moe-expert-rank-capacity-factor 1.25 " MICRO},
    {"ep2_etp2_rounds_full", TP "2 " SP EP "2 " A2A ROUNDS FULL "1 ", false},
    {"ep4_tp2_sp_zero3", TP "2 " SP EP "4 " ETP "1 " ZERO3 OVERLAP ROUNDS A2A, false},
    {"ep2_pp2_zbh1", EP "2 " PP "2 --pipeline-schedule zb-h1 " A2A ROUNDS, false},
};

std::vector<Layout> layouts() {
  std::vector<Layout> chosen;
  for (const Layout& layout : kLayouts)
    if (layout.always || whole_matrix()) chosen.push_back(layout);
  return chosen;
}

std::string differences(const TrainingTrace& trace, const TrainingTrace& reference, double rtol) {
  const std::vector<Comparison> comparisons = compare_traces(trace, reference, rtol);
  EXPECT_GT(comparisons.size(), 20u);
  std::string text;
  for (const std::string& fault : trace.faults) text += cat("  ", fault, "\n");
  for (const Comparison& c : comparisons)
    if (!c.holds()) text += cat("  ", c.name, ": ", c.difference, " > ", c.allowed, "\n");
  return text;
}

TrainingTrace trace(const Arguments& arguments, int steps, const RoutingReplay* routing = nullptr,
                    at::ScalarType dtype = at::kDouble) {
  TraceOptions options{dtype, steps};
  options.weights = dtype;
  options.routing = routing;
  return trace_training(gpt_task(), arguments, options);
}

class ExpertLoads : public testing::TestWithParam<Layout> {};

TEST_P(ExpertLoads, EqualOneRank) {
  constexpr int kSteps = 2;
  const Arguments arguments = parse_run(cat(kModel, GetParam().flags), kRanks);
  for (int load = 0; load < kLoads; ++load) {
    SCOPED_TRACE(kNames[load]);
    RoutingTable table;
    record(table, static_cast<Load>(load), kSteps * kBatch);
    const RoutingReplay routing{.imposed = &table, .only_experts = true};
    const TrainingTrace one = trace(serial_arguments(arguments), kSteps, &routing);
    EXPECT_EQ(differences(trace(arguments, kSteps, &routing), one, 1e-10), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ExpertLoads, testing::ValuesIn(layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

// -- bits

// Gradients are sums in an order that rounds change, what the forward computes is not.
TEST(ExpertBits, AreThoseOfAnotherRunAndOfRounds) {
  RoutingTable table;
  record(table, kOneRank, 2 * kBatch);
  const RoutingReplay routing{.imposed = &table, .only_experts = true};
  for (const char* dispatcher : {A2A, ""}) {
    const std::string flags = cat(kModel, "--moe-aux-loss-coeff 0.1 ", EP "2 ", dispatcher);
    const Arguments arguments = parse_run(flags, 2);
    for (const RoutingReplay* imposed : {static_cast<const RoutingReplay*>(nullptr), &routing}) {
      const TrainingTrace first = trace(arguments, 2, imposed, at::kFloat);
      EXPECT_EQ(differences(trace(arguments, 2, imposed, at::kFloat), first, 0), "");
      const TrainingTrace rounds =
          trace(parse_run(cat(flags, " ", ROUNDS), 2), 1, imposed, at::kFloat);
      for (const char* name : {"loss", "load_balancing_loss"})
        EXPECT_EQ(rounds.steps[0].number(name), first.steps[0].number(name)) << name;
    }
  }
}

// -- what a router has learned

// Text of this repository, a byte for a token.
std::string write_text() {
  const std::string prefix = testing::TempDir() + "/expert_loads_text";
  IndexedDatasetBuilder builder(prefix, IndexedType::kUInt16);
  for (const char* name : {"experts.md", "planted_bugs.md", "quality.md"}) {
    std::ifstream file(std::string(MEGATRON_SOURCE_DIR) + "/docs/" + name, std::ios::binary);
    std::vector<int64_t> bytes;
    for (char c = 0; file.get(c);) bytes.push_back(static_cast<unsigned char>(c));
    EXPECT_GT(bytes.size(), 1000u) << name;
    builder.add_sequence(bytes);
    builder.end_document();
  }
  builder.finish();
  return prefix;
}

TEST(LearnedLoad, EqualsOneRank) {
  if (!whole_matrix()) GTEST_SKIP() << "part of `make matrix`";
  constexpr int kLearned = 100, kSteps = 2;
  std::string flags = kModel;
  const auto replace = [&](const std::string& old, const std::string& with) {
    flags.replace(flags.find(old), old.size(), with);
  };
  replace("--vocab-size 101 --mock-data", cat("--vocab-size 256 --data-path ", write_text()));
  RoutingTable all, last;
  const RoutingReplay recorded{&all, nullptr}, imposed{.imposed = &last, .only_experts = true};
  trace(parse_run(flags, 1), kLearned, &recorded, at::kFloat);
  at::Tensor counts = at::zeros({kExperts}, at::kLong);
  for (int64_t layer = 1; layer <= kLayers; ++layer)
    for (int64_t sample = 0; sample < kSteps * kBatch; ++sample) {
      const at::Tensor position = at::arange(kLength, at::kLong);
      const auto at_sample = [&](int64_t number) {
        return TokenPositions{at::full({1}, number, at::kLong), position};
      };
      const at::Tensor choices = all.find(layer, at_sample((kLearned - kSteps) * kBatch + sample));
      last.record(layer, at_sample(sample), choices);
      counts += choices.flatten().to(at::kLong).bincount({}, kExperts);
    }
  EXPECT_GT(counts.max().item<int64_t>(), counts.min().item<int64_t>());
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    const Arguments arguments = parse_run(cat(flags, layout.flags), kRanks);
    const TrainingTrace one = trace(serial_arguments(arguments), kSteps, &imposed);
    EXPECT_EQ(differences(trace(arguments, kSteps, &imposed), one, 1e-10), "");
  }
}

// -- memory

// One rank of a run whose peaks of memory are measured.
class MeasuredRank {
 public:
  MeasuredRank(const Arguments& arguments, const std::shared_ptr<Backend>& world)
      : arguments_(arguments),
        groups_(make_parallel_groups(arguments.parallel, world)),
        task_(gpt_task()),
        meter_(std::make_shared<Meter>()),
        guard_(c10::DebugInfoKind::PROFILER_STATE, meter_) {
    const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
    const Vocabulary vocabulary = vocabulary_of(arguments, *tokenizer);
    datasets_ = build_datasets(task_, arguments, *tokenizer);
    model_ = build_model(task_, arguments, vocabulary, groups_, model_dtype(arguments.optimizer),
                         at::kCPU, StartPoint{});
    loader_ = make_train_loader(arguments, groups_, datasets_.train, 0, at::kCPU);
  }

  struct Step {
    int64_t bytes = 0;  // the most beyond what lay there before
    double loss = 0, count_over_mean = 0;
  };

  Step step(const RoutingReplay* routing = nullptr) {
    StepOptions options = step_options(arguments_, consumed_);
    options.routing = routing;
    consumed_ += options.global_batch_size;
    BatchMaker batches(at::kCPU, groups_.cp);
    Timers timers(0);
    const int64_t before = meter_->live;
    meter_->most = before;
    OutcomeReader reader(at::kCPU);
    reader.push(
        train_step(model_, task_, options, [&] { return batches.make(loader_->next()); }, timers));
    StepNumbers numbers;
    EXPECT_TRUE(reader.pop(numbers, /*all=*/true));
    return {meter_->most - before, numbers.loss, numbers.count_over_mean};
  }

  // Adds to the bias of the experts of one rank, so that all tokens choose them.
  void pull(int64_t rank) {
    const at::NoGradGuard no_grad;
    for (const ModelChunk& chunk : model_.chunks)
      for (StateTensor& state : chunk.store->state())
        if (state.description.key.ends_with("router.expert_bias")) {
          state.data.zero_();
          state.data.narrow(0, rank * kExperts / kRanks, kExperts / kRanks).fill_(4.0);
        }
  }

 private:
  const Arguments& arguments_;
  const ParallelGroups groups_;
  const PretrainTask task_;
  const std::shared_ptr<Meter> meter_;
  const c10::DebugInfoGuard guard_;
  TrainValidTestDatasets datasets_;
  TrainedModel model_;
  std::unique_ptr<DataLoader> loader_;
  int64_t consumed_ = 0;
};

// Wide enough that rows of experts are most of what a step allocates.
constexpr const char* kWide = "--ffn-hidden-size 192 --expert-model-parallel-size 4 ";

using Body = std::function<void(MeasuredRank&, int rank)>;

void run_measured(const std::string& flags, const Body& body) {
  const Arguments arguments = parse_run(cat(kModel, kWide, flags), kRanks);
  run_ranks(kRanks, [&](const std::shared_ptr<Backend>& world) {
    at::set_num_threads(1);
    MeasuredRank rank(arguments, world);
    body(rank, world->rank());
  });
}

// The most bytes of a step on any rank under a load.
int64_t most_bytes(const std::string& flags, Load load) {
  RoutingTable table;
  record(table, load, 2 * kBatch);
  const RoutingReplay routing{.imposed = &table, .only_experts = true};
  int64_t most = 0;
  std::mutex mutex;
  run_measured(flags, [&](MeasuredRank& rank, int) {
    rank.step(&routing);
    const int64_t bytes = rank.step(&routing).bytes;
    const std::lock_guard lock(mutex);
    most = std::max(most, bytes);
  });
  return most;
}

// What a load takes beyond an even one: without rounds all rows of the fullest rank in every layer,
// with them one more round in one layer.
TEST(ExpertMemory, RoundsBoundEveryLoad) {
  const int64_t even = most_bytes(A2A, kEven), full = most_bytes(A2A, kOneRank);
  ASSERT_GT(full, 2 * even) << "the rows of experts are most of it";
  for (int load = 0; load < kLoads; ++load)
    EXPECT_LT(most_bytes(A2A ROUNDS, static_cast<Load>(load)), even + (full - even) / 3)
        << kNames[load];
}

// All tokens come to choose the experts of one rank, then those of the next.
TEST(ExpertMemory, StaysBoundedWhenARouterCollapses) {
  const int steps = whole_matrix() ? 1000 : 20;
  const int64_t even = most_bytes(A2A, kEven), full = most_bytes(A2A, kOneRank);
  std::mutex mutex;
  int64_t most = 0;
  double collapsed = 0;
  run_measured(A2A "--moe-expert-rank-capacity-factor 1.25", [&](MeasuredRank& rank, int) {
    for (int i = 0; i < steps; ++i) {
      rank.pull(i * kRanks / steps);
      const MeasuredRank::Step step = rank.step();
      const std::lock_guard lock(mutex);
      ASSERT_TRUE(std::isfinite(step.loss)) << "step " << i;
      collapsed = std::max(collapsed, step.count_over_mean);
      if (i > 0) most = std::max(most, step.bytes);  // the first allocates what stays
    }
  });
  EXPECT_EQ(collapsed, static_cast<double>(kExperts) / kTopk) << "an expert has every token";
  EXPECT_LT(most, even + (full - even) / 2);
}

}  // namespace
}  // namespace megatron
