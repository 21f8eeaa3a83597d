// What a step of an encoder-decoder allocates, next to its plan.
#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

const std::string kStacks =
    "--task t5 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --attention-dropout 0 "
    "--global-batch-size 8 --eval-iters 0 --remove-padding false ";

class T5Steps : public testing::TestWithParam<ActivationCase> {};

TEST_P(T5Steps, AllocateWhatThePlanSays) {
  const auto& c = GetParam();
  const Arguments a = parse(kStacks + kRun + c.flags, c.world_size);
  const LayoutPlan plan =
      make_layout_plan(a, {500, 1024}, /*on_gpu=*/false, find_task(a).model_provider);
  std::mutex mutex;
  run_ranks(static_cast<int>(c.world_size), [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(a.parallel, world);
    const auto real = static_cast<double>(step_peak(a, {500, 1024}, groups));
    const std::lock_guard lock(mutex);
    const auto planned = static_cast<double>(stage_memory(plan, groups.pp.rank()).allocated());
    EXPECT_GE(planned, 0.98 * real) << "stage " << groups.pp.rank();
    EXPECT_LE(planned, 1.05 * real) << "stage " << groups.pp.rank();
  });
}

#define SMALL " --num-layers 3 --decoder-seq-length 128 --micro-batch-size 2 "
// Scores of attention take most of the peak.
#define WIDE " --num-layers 2 --decoder-seq-length 64 --micro-batch-size 4 "
#define PP2 " --pipeline-model-parallel-size 2 "

INSTANTIATE_TEST_SUITE_P(
    Layouts, T5Steps,
    testing::Values(ActivationCase{"serial", SMALL}, ActivationCase{"pp2", SMALL PP2, 2},
                    // The cut is at the border between the stacks
                    ActivationCase{"pp2_even", WIDE PP2 "--pipeline-model-parallel-layout Eee|ttL",
                                   2},
                    ActivationCase{"lora", WIDE "--lora-rank 4"},
                    ActivationCase{"pp2_lora", WIDE PP2 "--lora-rank 4", 2},
                    ActivationCase{"pp2_lora_relative",
                                   WIDE PP2 "--lora-rank 4 --position-embedding-type relative "
                                            "--query-pre-attn-scalar 1 --normalization RMSNorm "
                                            "--disable-bias-linear --geglu",
                                   2}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace megatron
