// Plans of what stores hold for a while, against what the CPU's allocator counts.
#include "megatron/training/planning/sharded_stores.h"

#include <gtest/gtest.h>

#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/training/planning/memory_estimate.h"
#include "tests/unit/training/measured_step.h"

namespace megatron {
namespace {

// Sharded weights that are gathered in advance: the units in memory at once are neighbours in the
// order of the passes.
struct GatheringCase {
  const char* name;
  const char* flags;
  int64_t world_size = 2;
  bool evaluates = false;
};

class GatheredWeights : public testing::TestWithParam<GatheringCase> {};

TEST_P(GatheredWeights, InAdvanceAreNeighbours) {
  const Vocabulary vocabulary{500, 2048};  // a table is larger than a layer
  const auto bytes_of = [&](const char* more) {
    const Arguments a =
        parse(cat("--num-layers 8 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 8 "
                  "--seq-length 32 --attention-dropout 0 --micro-batch-size 1 --use-megatron-fsdp "
                  "--overlap-grad-reduce --global-batch-size 8 ",
                  kRun, GetParam().flags, more),
              GetParam().world_size);
    const LayoutPlan plan = make_layout_plan(a, vocabulary, /*on_gpu=*/false);
    std::vector<std::pair<int64_t, int64_t>> by_rank(static_cast<size_t>(GetParam().world_size));
    run_ranks(static_cast<int>(GetParam().world_size), [&](const std::shared_ptr<Backend>& world) {
      const ParallelGroups groups = make_parallel_groups(a.parallel, world);
      by_rank[static_cast<size_t>(world->rank())] = {
          stage_memory(plan, groups.pp.rank()).allocated(),
          step_peak(a, vocabulary, groups, GetParam().evaluates)};
    });
    return by_rank;
  };
  // Ranks of the last stage come last. The peak of the first one is where its table is reduced.
  const auto one_by_one = bytes_of(""), in_advance = bytes_of(" --overlap-param-gather");
  for (size_t rank = one_by_one.size() - 2; rank < one_by_one.size(); ++rank) {
    const auto planned = static_cast<double>(in_advance[rank].first - one_by_one[rank].first),
               real = static_cast<double>(in_advance[rank].second - one_by_one[rank].second);
    EXPECT_NEAR(planned / real, 1, 0.02) << "rank " << rank << ": " << planned << " and " << real;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Orders, GatheredWeights,
    testing::Values(
        GatheringCase{"tied", " --eval-iters 0"},
        GatheringCase{"untied", " --eval-iters 0 --untie-embeddings-and-output-weights"},
        // The head is followed by the embedding of the next forward
        GatheringCase{"tied_after_an_evaluation", "", 2, true},
        GatheringCase{"untied_after_an_evaluation", " --untie-embeddings-and-output-weights", 2,
                      true},
        GatheringCase{"stages",
                      " --eval-iters 0 --untie-embeddings-and-output-weights "
                      "--pipeline-model-parallel-size 2",
                      4},
        GatheringCase{"stages_of_two_chunks",
                      " --eval-iters 0 --untie-embeddings-and-output-weights "
                      "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
                      4}),
    [](const auto& info) { return info.param.name; });

// A step with sharded gradients and weights: what the stores hold is counted at the moments of the
// passes at which it is held. Of each model layers are larger than tables, or tables larger than
// layers.
struct ShardedCase {
  const char* name;
  std::string flags;
  int64_t world_size = 2;
};

class ShardedPeak : public testing::TestWithParam<ShardedCase> {};

TEST_P(ShardedPeak, IsWhatThePlanSays) {
  struct Sizes {
    const char* flags;
    int64_t rows;  // of the vocabulary
  };
  for (const Sizes& model :
       {Sizes{"--seq-length 256 ", 1024}, Sizes{"--ffn-hidden-size 128 --seq-length 32 ", 2048}}) {
    const Arguments a =
        parse(cat("--num-layers 8 --hidden-size 128 --num-attention-heads 8 --attention-dropout 0 "
                  "--micro-batch-size 1 --global-batch-size 8 --eval-iters 0 --use-megatron-fsdp ",
                  model.flags, kRun, GetParam().flags),
              GetParam().world_size);
    const Vocabulary vocabulary{500, model.rows};
    const LayoutPlan plan = make_layout_plan(a, vocabulary, /*on_gpu=*/false);
    std::mutex mutex;
    run_ranks(static_cast<int>(GetParam().world_size), [&](const std::shared_ptr<Backend>& world) {
      const ParallelGroups groups = make_parallel_groups(a.parallel, world);
      const auto real = static_cast<double>(step_peak(a, vocabulary, groups));
      const std::lock_guard lock(mutex);
      const auto planned = static_cast<double>(stage_memory(plan, groups.pp.rank()).allocated());
      EXPECT_NEAR(planned / real, 1, 0.01)
          << model.flags << "stage " << groups.pp.rank() << ": " << planned << " and " << real;
    });
  }
}

const std::string kOverlapped = "--overlap-grad-reduce ",
                  kInAdvance = kOverlapped + "--overlap-param-gather ",
                  kUntied = "--untie-embeddings-and-output-weights ",
                  kStages = kUntied + "--pipeline-model-parallel-size 2 ",
                  kChunks = kStages + "--num-virtual-stages-per-pipeline-rank 2 ";

INSTANTIATE_TEST_SUITE_P(
    Orders, ShardedPeak,
    testing::Values(
        ShardedCase{"one_by_one", ""}, ShardedCase{"tied", kOverlapped},
        ShardedCase{"untied", kOverlapped + kUntied},
        ShardedCase{"stages", kOverlapped + kStages, 4},
        ShardedCase{"chunks", kOverlapped + kChunks, 4}, ShardedCase{"tied_in_advance", kInAdvance},
        ShardedCase{"stages_in_advance", kInAdvance + kStages, 4},
        // A chunk keeps what it gathered, and what it reduces, while the other one runs
        ShardedCase{"chunks_in_advance", kInAdvance + kChunks, 4},
        // Gradients of norms and biases fill all buckets before those of matrices
        ShardedCase{"zb_h1", kInAdvance + kStages + "--pipeline-schedule zb-h1", 4},
        ShardedCase{"zb_v", kInAdvance + kChunks + "--pipeline-schedule zb-v", 4},
        ShardedCase{"vocabulary", kInAdvance + kStages + "--pipeline-vocab-parallel", 4},
        ShardedCase{"gradients", kOverlapped + "--data-parallel-sharding-strategy optim_grads"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace megatron
