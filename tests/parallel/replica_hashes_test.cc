// A flipped bit in replicated tensors is detected and its rank is named; there are no false alarms;
// and the check changes no bit. Ranks are threads. MEGATRON_REPLICA_TRIALS=200 and
// MEGATRON_REPLICA_STEPS=1000 run longer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <regex>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/pretrain.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

using testing::HasSubstr;

constexpr const char* kModel =
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --kv-channels 4 "
    "--seq-length 8 "
    "--max-position-embeddings 8 --tokenizer-type NullTokenizer --vocab-size 61 --mock-data "
    "--num-workers 0 --micro-batch-size 1 "
    "--train-samples 100000 --lr 1e-3 --eval-iters 0 --device cpu --num-threads 1";

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

Arguments arguments_of(const std::string& flags, int ranks) {
  return parse_run(cat(kModel, " --global-batch-size ", ranks, " ", flags), ranks);
}

// One rank that trains.
class Rank {
 public:
  Rank(const Arguments& arguments, const std::shared_ptr<Backend>& world)
      : arguments_(arguments),
        groups_(make_parallel_groups(arguments.parallel, world)),
        task_(gpt_task()),
        batches_(at::kCPU, groups_.cp),
        outcomes_(at::kCPU) {
    const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
    datasets_ = build_datasets(task_, arguments, *tokenizer);
    model_ = build_model(task_, arguments, vocabulary_of(arguments, *tokenizer), groups_,
                         model_dtype(arguments.optimizer), at::kCPU, StartPoint{});
    loader_ = make_train_loader(arguments, groups_, datasets_.train, 0, at::kCPU);
  }

  // Trains one step and, where `compare`, compares; returns what differed. `before` runs before the
  // first micro-batch is read.
  std::string step(bool compare, const std::function<void()>& before = {}) {
    ++iteration_;
    StepOptions options = step_options(arguments_, 0);
    if (compare) options.compare_replicas = iteration_;
    Timers timers(0);
    bool first = true;
    outcomes_.push(train_step(
        model_, task_, options,
        [&] {
          if (std::exchange(first, false) && before) before();
          return batches_.make(loader_->next());
        },
        timers));
    StepNumbers numbers;
    outcomes_.pop(numbers, /*all=*/true);
    EXPECT_TRUE(compare || !numbers.replicas_differ);
    return numbers.replicas_differ ? model_.replicas->describe(iteration_) : "";
  }

  // Tensors by kind: "weight", "fp32_param", "exp_avg", "exp_avg_sq".
  std::vector<std::pair<std::string, at::Tensor>> tensors(const std::string& kind) const {
    std::vector<std::pair<std::string, at::Tensor>> all;
    if (kind == "weight") {
      for (const ModelChunk& chunk : model_.chunks) {
        const auto parts = chunk.store->state();
        for (size_t i = 0; i < parts.size(); ++i) {
          const Parameter& parameter = *chunk.store->parameters()[i];
          all.emplace_back(parameter.name, chunk.store->shards_values()
                                               ? parts[i].data
                                               : parameter.value.view({-1}));
        }
      }
      return all;
    }
    const std::string prefix = cat("optimizer.state.", kind, ".");
    for (const StateTensor& entry : model_.optimizer->tensors())
      if (entry.description.key.starts_with(prefix))
        all.emplace_back(entry.description.key.substr(prefix.size()), entry.data);
    return all;
  }

  const ReplicaHashes& replicas() const { return *model_.replicas; }

 private:
  const Arguments& arguments_;
  const ParallelGroups groups_;
  const PretrainTask task_;
  TrainValidTestDatasets datasets_;
  TrainedModel model_;
  std::unique_ptr<DataLoader> loader_;
  BatchMaker batches_;
  OutcomeReader outcomes_;
  int64_t iteration_ = 0;
};

void run_layout(const std::string& flags, int ranks,
                const std::function<void(Rank&, int rank)>& body) {
  const Arguments arguments = arguments_of(flags, ranks);
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
    Rank rank(arguments, world);
    body(rank, world->rank());
  });
}

// A layout, a kind of tensor of which every rank has copies on others, and whether every step
// writes it anew.
struct Row {
  const char* name;
  const char* flags;
  const char* kind;
  bool rewritten;
  bool pairs;        // copies, or those of data ranks, come in twos: both ranks may be named
  const char* only;  // part of the name of tensors that have copies; empty: all have
};

constexpr Row kRows[] = {
    {"dp4_fp32", "", "weight", false, false, ""},
    {"dp4_fp32_moment", "", "exp_avg", false, false, ""},
    {"dp4_fp32_second_moment", "", "exp_avg_sq", false, false, ""},
    {"dp4_bf16_master", "--bf16", "fp32_param", false, false, ""},
    {"dp4_bf16_moment", "--bf16", "exp_avg", false, false, ""},
    {"dp4_bf16", "--bf16", "weight", true, false, ""},
    {"zero1_bf16", "--bf16 --use-distributed-optimizer", "weight", true, false, ""},
    {"zero1_instances_master",
     "--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2", "fp32_param",
     false, true, ""},
    {"fsdp_instances",
     "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--num-distributed-optimizer-instances 2",
     "weight", true, true, ""},
    {"fsdp_instances_moment",
     "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
     "--num-distributed-optimizer-instances 2",
     "exp_avg_sq", false, true, ""},
    {"tp4_norms", "--tensor-model-parallel-size 4 --sequence-parallel", "weight", false, false,
     "final_layernorm"},
    {"tp2_dp2", "--bf16 --tensor-model-parallel-size 2", "fp32_param", false, true,
     "linear_fc1.weight"},
    {"tp2_dp2_norms", "--tensor-model-parallel-size 2", "exp_avg", false, true, "final_layernorm"},
    {"pp2_dp2_tied", "--pipeline-model-parallel-size 2", "weight", false, false, "word_embeddings"},
};

// Bytes of the tensors of one kind, of all ranks, by name and size: whether a flip has left
// anything.
class AllTensors {
 public:
  void put(int rank, const Rank& one) {
    const std::lock_guard lock(mutex_);
    for (const char* kind : {"weight", "fp32_param", "exp_avg", "exp_avg_sq"})
      for (const auto& [name, tensor] : one.tensors(kind))
        tensors_[rank][cat(kind, " ", name)] = tensor.clone();
  }
  // Whether tensors of two ranks that had the same bits before have the same bits.
  bool all_equal_as_in(const AllTensors& before) const {
    for (const auto& [rank, own] : tensors_)
      for (const auto& [other, theirs] : tensors_)
        for (const auto& [name, tensor] : own) {
          if (!theirs.contains(name) ||
              !same(before.tensors_.at(rank).at(name), before.tensors_.at(other).at(name)))
            continue;
          if (!same(tensor, theirs.at(name))) return false;
        }
    return true;
  }

 private:
  static bool same(const at::Tensor& x, const at::Tensor& y) {
    return x.numel() == y.numel() &&
           (x.nbytes() == 0 ||
            std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
  }
  std::mutex mutex_;
  std::map<int, std::map<std::string, at::Tensor>> tensors_;
};

enum class Verdict { kNamed, kHealed, kMissed };

// Flips one bit of one rank; everything about it follows from the seed.
Verdict flip_one(const Row& row, int seed) {
  constexpr int kInterval = 3;
  std::mt19937 random(static_cast<unsigned>(seed));
  const int rank_to_flip = static_cast<int>(random() % 4);
  // What every step writes anew is flipped in the step that is compared, before it computes.
  const int step_to_flip =
      2 + (row.rewritten ? kInterval - 2 : static_cast<int>(random() % (kInterval - 1)));
  const unsigned choice = random(), place = random();
  std::string name;
  std::vector<std::string> texts(4);
  AllTensors before, after;
  run_layout(row.flags, 4, [&](Rank& rank, int i) {
    for (int step = 1; step <= kInterval; ++step) {
      texts[static_cast<size_t>(i)] += rank.step(step == kInterval || step == 1, [&] {
        if (step != step_to_flip || i != rank_to_flip) return;
        std::vector<std::pair<std::string, at::Tensor>> candidates;
        for (auto& candidate : rank.tensors(row.kind))
          if (candidate.second.numel() > 0 && candidate.first.find(row.only) != std::string::npos)
            candidates.push_back(candidate);
        // Of stages, only the first and the last have the table.
        if (candidates.empty()) return;
        auto& [chosen, tensor] = candidates[choice % candidates.size()];
        name = chosen;
        const size_t bit = place % (8 * tensor.nbytes());
        static_cast<unsigned char*>(tensor.data_ptr())[bit / 8] ^=
            static_cast<unsigned char>(1u << bit % 8);
      });
      if (step == 1) before.put(i, rank);  // now what has no copies differs between ranks
    }
    after.put(i, rank);
  });
  EXPECT_FALSE(name.empty()) << row.name;
  for (const std::string& text : texts) EXPECT_EQ(text, texts[0]) << "ranks say different things";
  if (texts[0].empty())
    return after.all_equal_as_in(before) && !row.rewritten ? Verdict::kHealed : Verdict::kMissed;
  EXPECT_THAT(texts[0],
              testing::StartsWith(cat("iteration ", kInterval,
                                      ": ranks that hold copies of the same tensors differ: ")));
  EXPECT_THAT(texts[0], HasSubstr("they were equal at iteration 1;")) << row.name;
  const bool rank_named =
      texts[0].find(cat("differs on rank ", rank_to_flip, " from ranks ")) != std::string::npos;
  const bool pair_named =
      std::regex_search(texts[0], std::regex(cat("differs between ranks (", rank_to_flip,
                                                 " and \\d|\\d and ", rank_to_flip, ")")));
  EXPECT_TRUE(rank_named || (row.pairs && pair_named))
      << row.name << " rank " << rank_to_flip << ": " << texts[0];
  // The tensor by name, unless others followed it before they were compared.
  if (row.rewritten) {
    EXPECT_THAT(texts[0], HasSubstr(name));
  }
  return rank_named || (row.pairs && pair_named) ? Verdict::kNamed : Verdict::kMissed;
}

TEST(ReplicaHashes, OneFlippedBitIsNamed) {
  const int trials = number_from("MEGATRON_REPLICA_TRIALS", static_cast<int>(std::size(kRows)));
  int named = 0, healed = 0;
  for (int seed = 0; named < trials && healed <= trials; ++seed) {
    const Row& row = kRows[seed % std::size(kRows)];
    const Verdict verdict = flip_one(row, seed);
    EXPECT_NE(verdict, Verdict::kMissed) << row.name << ", seed " << seed;
    if (verdict == Verdict::kMissed) break;
    (verdict == Verdict::kNamed ? named : healed) += 1;
  }
  std::printf(
      "named %d of %d; %d further flips were undone by rounding before the comparison, all tensors "
      "being equal again\n",
      named, trials, healed);
  EXPECT_EQ(named, trials);
  EXPECT_LE(healed, 1 + trials / 10);
}

TEST(ReplicaHashes, CleanStepsRaiseNoAlarm) {
  const int steps = number_from("MEGATRON_REPLICA_STEPS", 30);
  for (const auto& [ranks, flags] : std::vector<std::pair<int, const char*>>{
           {4, "--tensor-model-parallel-size 2 --sequence-parallel"},
           {4, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"},
           {4,
            "--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--num-distributed-optimizer-instances 2"},
           {4, "--pipeline-model-parallel-size 2"}}) {
    run_layout(flags, ranks, [&](Rank& rank, int) {
      EXPECT_GT(rank.replicas().size(), 0) << flags;
      for (int step = 0; step < steps; ++step)
        ASSERT_EQ(rank.step(/*compare=*/true), "") << flags << " step " << step;
    });
  }
}

TEST(ReplicaHashes, KnowsWhatHasCopies) {
  const auto count = [](const char* flags, int ranks) {
    int64_t size = -1;
    run_layout(flags, ranks, [&](Rank& rank, int i) {
      if (i == 0) size = rank.replicas().size();
    });
    return size;
  };
  const int64_t all = count("--bf16", 2);  // weights, master weights and two moments
  EXPECT_EQ(all % 4, 0);
  EXPECT_EQ(count("", 2), all / 4 * 3);  // fp32 weights are the master weights
  EXPECT_EQ(count("--bf16 --use-distributed-optimizer", 2), all / 4)
      << "states are divided, gathered weights are not";
  EXPECT_EQ(
      count("--bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 2),
      0)
      << "everything is divided";
  EXPECT_EQ(count("--bf16 --context-parallel-size 2", 2), all);
  const int64_t whole_over_tensor = count("--bf16 --tensor-model-parallel-size 2", 2);
  EXPECT_GT(whole_over_tensor, 0);
  EXPECT_LT(whole_over_tensor, all);
  EXPECT_EQ(count("--pipeline-model-parallel-size 2", 2), 3) << "the tied table and its states";
  EXPECT_EQ(count("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights", 2), 0);
}

TEST(ReplicaHashes, ChangeNoBit) {
  for (const char* flags :
       {"--bf16", "--tensor-model-parallel-size 2", "--bf16 --use-distributed-optimizer"}) {
    std::vector<std::vector<at::Tensor>> seen(2);
    for (const bool compare : {false, true}) {
      run_layout(flags, 4, [&](Rank& rank, int i) {
        for (int step = 0; step < 4; ++step) EXPECT_EQ(rank.step(compare), "");
        if (i != 3) return;
        for (const char* kind : {"weight", "exp_avg", "exp_avg_sq"})
          for (const auto& [name, tensor] : rank.tensors(kind))
            seen[compare].push_back(tensor.clone());
      });
    }
    ASSERT_EQ(seen[0].size(), seen[1].size());
    for (size_t i = 0; i < seen[0].size(); ++i) EXPECT_TRUE(at::equal(seen[0][i], seen[1][i]));
  }
}

// The whole loop: with --check-weight-hash-across-dp-replicas-interval a run in which a rank's
// weight changes by itself ends with an error; with 0 it trains on.
TEST(ReplicaHashes, ARunEndsWithTheName) {
  for (const int interval : {4, 0}) {
    Arguments arguments = arguments_of(
        cat("--check-weight-hash-across-dp-replicas-interval ", interval, " --log-interval 2"), 3);
    arguments.training.train_samples.reset();
    arguments.training.train_iters = 8;
    arguments.training.exit_signal_handler = false;
    ThreadAgreement::Room room(3);
    std::vector<std::string> errors(3);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    run_ranks(3, [&](const std::shared_ptr<Backend>& world) {
      ThreadAgreement agreement(room, world->rank());
      Job job;
      job.groups = make_parallel_groups(arguments.parallel, world);
      job.agreement = &agreement;
      PretrainTask task = gpt_task();
      task.forward_step = [&, forward = task.forward_step, step = 0](
                              Model& model, const Batch& batch, const StageTensors& input,
                              const ForwardContext& context) mutable {
        if (++step == 6 && world->rank() == 1)
          model.parameters().front()->value.view({-1})[5] += 0.25;
        return forward(model, batch, input, context);
      };
      try {
        pretrain(task, arguments, job);
      } catch (const Error& error) {
        errors[static_cast<size_t>(world->rank())] = error.what();
      }
    });
    testing::internal::GetCapturedStdout();
    const std::string log = testing::internal::GetCapturedStderr();
    for (const std::string& error : errors) {
      if (interval == 0) {
        EXPECT_EQ(error, "");
        EXPECT_THAT(log, testing::Not(HasSubstr("copies of ")));
        continue;
      }
      EXPECT_THAT(
          log, HasSubstr(" tensors of this rank on other ranks are compared every 4 iterations"));
      EXPECT_THAT(error,
                  HasSubstr("iteration 8: ranks that hold copies of the same tensors differ: "));
      EXPECT_THAT(
          error,
          HasSubstr(
              "embedding.word_embeddings.weight (weight) differs on rank 1 from ranks 0 and 2"));
      EXPECT_THAT(error, HasSubstr("\nhint: they were equal at iteration 4; a checkpoint from "
                                   "before it holds none of this"));
    }
  }
}

}  // namespace
}  // namespace megatron
