// Layers with experts, mixed with plain ones: every layout against one rank, with the experts over
// several ranks and without, traffic, and checkpoints between layouts.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/planning/communication_estimate.h"
#include "megatron/training/planning/step_estimate.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

constexpr const char* kRun =
    "--layer-pattern *E,*- --num-layers 4 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 16 --eval-iters 0 --device cpu ";
constexpr const char* kSmall =
    "--hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 24 "
    "--init-method-std 0.2 --adam-eps 1e-3 --hidden-dropout 0.1 ";
constexpr const char* kMeasured =
    "--hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout 0 ";

std::vector<ProvedLayout> layouts() {
  std::vector<ProvedLayout> all = proved_layouts();
  all.insert(all.end(), {{"ep2", 2, ""},
                         {"ep2_tp2_sp", 4, "--tensor-model-parallel-size 2 --sequence-parallel"},
                         {"ep2_dp4", 4, ""},
                         {"ep2_dp4_zero1", 4, "--use-distributed-optimizer --overlap-grad-reduce"},
                         {"ep2_dp4_zero3", 4,
                          "--use-megatron-fsdp --overlap-grad-reduce --overlap-param-gather"},
                         {"ep2_cp2", 2, "--context-parallel-size 2"},
                         {"ep2_pp2_dp2", 4, "--pipeline-model-parallel-size 2"}});
  return all;
}

std::string flags_of(const ProvedLayout& layout) {
  const bool divided = std::string(layout.name).starts_with("ep2");
  return cat(layout.flags, divided ? " --expert-model-parallel-size 2" : "");
}

class ExpertLayouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(ExpertLayouts, TrainWhatOneRankTrains) {
  EXPECT_EQ(differences_in_fp64(cat(kRun, kSmall, flags_of(GetParam())), GetParam().ranks), "");
}

TEST_P(ExpertLayouts, AreProved) {
  EXPECT_EQ(unproved(cat(kRun, kSmall, flags_of(GetParam())), GetParam().ranks), "");
}

TEST_P(ExpertLayouts, NeedTheMemoryOfThePlan) {
  for (const RankMemory& rank :
       memory_of_ranks(cat(kRun, kMeasured, flags_of(GetParam())), GetParam().ranks))
    EXPECT_NEAR(double(rank.planned) / double(rank.metered), 1.0, 0.01)
        << rank.planned << " and " << rank.metered;
}

INSTANTIATE_TEST_SUITE_P(Proofs, ExpertLayouts, testing::ValuesIn(layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Experts, SendTokensAndTheirSums) {
  const Arguments arguments = parse_run(cat(kRun, kMeasured, "--expert-model-parallel-size 2"), 2);
  const LayoutPlan plan = make_layout_plan(arguments, {101, 104});
  // 2 of 4 layers; 4 micro-batches; tokens, weights of 4 experts, and sums, half of them to the
  // other rank
  const double rows = 2 * 2 * 256 / 2.0;
  for (const GroupTraffic& traffic : stage_traffic(plan, 0)) {
    if (traffic.group != "ep") continue;
    EXPECT_EQ(traffic.ranks, 2);
    EXPECT_DOUBLE_EQ(traffic.forward, 2 * 4 * rows * (2 * 128 + 4) * 4);
    EXPECT_DOUBLE_EQ(traffic.backward, traffic.forward);
    const MachineSpeeds inside{1e18, 1e6, 1e18, 8};
    EXPECT_NEAR(estimate_step(plan, inside).expert, traffic.total() / 1e6,
                1e-6 * traffic.total() / 1e6);
    return;
  }
  ADD_FAILURE() << "no traffic over the expert axis";
}

// -- checkpoints

// All that a rank holds, by name.
using State = std::map<std::string, at::Tensor>;

std::vector<StateTensor> tensors_of(const TrainedModel& model) {
  std::vector<StateTensor> all = model.optimizer->tensors();
  for (StateTensor& entry : model.chunks.front().store->state()) all.push_back(std::move(entry));
  return all;
}

// The whole state of `ranks` ranks, which they load from a folder, or train one step where it is
// empty, and save into another.
State state_of(int ranks, const std::string& from, const std::string& to) {
  const Arguments arguments =
      parse_run(cat(kRun, kSmall, "--expert-model-parallel-size ", ranks, " --save ", to), ranks);
  ThreadAgreement::Room room(ranks);
  std::mutex mutex;
  State state;
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(arguments.parallel, world);
    ThreadAgreement agreement(room, world->rank());
    const PretrainTask task = find_task(arguments);
    const auto tokenizer = make_tokenizer(arguments.tokenizer);
    TrainedModel model = build_model(task, arguments, vocabulary_of(arguments, *tokenizer), groups,
                                     at::kFloat, at::kCPU, StartPoint{});
    RunState run;
    if (from.empty()) {
      const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);
      const auto loader = make_train_loader(arguments, groups, datasets.train, 0, at::kCPU);
      BatchMaker batches(at::kCPU, groups.cp);
      Timers timers(0);
      train_step(
          model, task, step_options(arguments, 0), [&] { return batches.make(loader->next()); },
          timers);
      run.task = task.name;
      run.iteration = 1;
    } else {
      for (const StateTensor& entry : tensors_of(model)) entry.data.fill_(-77.0);
      const Checkpoint checkpoint(find_checkpoints(from).at(0).directory);
      run = run_state_from_json(checkpoint.state(), from);
      load_model_state(checkpoint, run, arguments.optimizer, model, {/*optimizer=*/true},
                       &agreement);
    }
    for (const StateTensor& entry : tensors_of(model)) {
      const std::lock_guard lock(mutex);
      state[entry.description.key] = entry.data.clone();
    }
    TrainingLog log(arguments.training, RunFacts{});
    Timers timers(0);
    run.step = model.optimizer->read_state();
    run.schedule = model.optimizer->schedule();
    Checkpointer(arguments, model, log, timers, {}, /*replace_existing=*/false, &agreement)
        .save(run);
  });
  return state;
}

void expect_same(const State& a, const State& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    const at::Tensor& other = b.at(name);
    ASSERT_EQ(tensor.nbytes(), other.nbytes()) << name;
    EXPECT_EQ(std::memcmp(tensor.const_data_ptr(), other.const_data_ptr(), tensor.nbytes()), 0)
        << name;
  }
}

TEST(Experts, CheckpointsOfTwoExpertRanksLoadOnOneAndBack) {
  const std::string folder = testing::TempDir() + "experts_";
  for (const char* name : {"two", "one", "again"}) std::filesystem::remove_all(folder + name);
  const State two = state_of(2, "", folder + "two");
  const State one = state_of(1, folder + "two", folder + "one");
  expect_same(two, one);
  expect_same(two, state_of(2, folder + "one", folder + "again"));
  EXPECT_TRUE(two.contains("decoder.layers.2.mlp.experts.3.linear_fc1.weight"));
  EXPECT_NE(two.at("decoder.layers.0.mlp.router.weight").abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace megatron
