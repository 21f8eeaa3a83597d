// What a GPT that reads neighbours holds and computes, next to its plan.
#include <gtest/gtest.h>

#include "megatron/models/retro/retro_config.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

const std::string kRetroModel =
    "--task retro --num-layers 4 --retro-layers 2 3 --retro-chunk-length 32 --hidden-size 128 "
    "--num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 2 "
    "--attention-dropout 0 --retro-encoder-attention-dropout 0 ";

class RetroActivations : public testing::TestWithParam<ActivationCase> {};

TEST_P(RetroActivations, AreWhatThePlanSays) { expect_planned(GetParam(), kRetroModel); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, RetroActivations,
    testing::Values(
        // Peaks are planned up to 4.5% above what is held while the encoder runs backward.
        ActivationCase{"serial", "", 1, true, 0.05},
        ActivationCase{"gated", "--swiglu --normalization RMSNorm --disable-bias-linear", 1, true,
                       0.05},
        ActivationCase{"one_layer_three_neighbors",
                       "--retro-layers 4 --retro-encoder-num-layers 1 --retro-num-neighbors 3", 1,
                       true, 0.05},
        // The forward's peak is less than half of the backward's, and planned up to 13% above.
        ActivationCase{"recomputed",
                       "--recompute-granularity full --recompute-method uniform "
                       "--recompute-num-layers 1",
                       1, true, 0.05, 0.14},
        ActivationCase{"recomputed_tp2_sp",
                       "--recompute-granularity full --recompute-method uniform "
                       "--recompute-num-layers 1 --tensor-model-parallel-size 2 "
                       "--sequence-parallel",
                       2, true, 0.05, 0.14},
        ActivationCase{"tp2", "--tensor-model-parallel-size 2", 2, true, 0.05},
        ActivationCase{"tp2_sp", "--tensor-model-parallel-size 2 --sequence-parallel", 2, true,
                       0.05}),
    [](const auto& info) { return info.param.name; });

// The products of the plan are those that the log counts.
TEST(RetroPlan, CountsTheProductsOfTheLog) {
  const Arguments a = parse(kRetroModel + kRun, 1);
  Arguments plain = a;
  plain.training.task = "gpt";
  const PretrainTask task = find_task(a);
  const LayoutPlan plan = make_layout_plan(a, {500, 1024}, true, task.model_provider),
                   without = make_layout_plan(plain, {500, 1024});
  double more = 0;
  for (int64_t layer = 1; layer <= 4; ++layer)
    more += plan.layer_cost(layer).products() - without.layer_cost(layer).products();
  EXPECT_NEAR(more, retrieval_products(plan.model_config()), 1e-6 * more);
}

// Encoded neighbours cross the borders behind the first layer that reads them and before the last,
// 2 K times as large as the stream, and every segment between holds them.
TEST(RetroPlan, PricesWhatMovesBesideTheStream) {
  const Arguments a = parse(kRetroModel + kRun + "--pipeline-model-parallel-size 4", 4);
  const LayoutPlan plan = make_layout_plan(a, {500, 1024}, true, find_task(a).model_provider);
  const int64_t stream = plan.stream_bytes();
  EXPECT_EQ(plan.border_bytes(1), stream);
  EXPECT_EQ(plan.border_bytes(2), 5 * stream);  // of layers 2 and 3
  EXPECT_EQ(plan.border_bytes(3), stream);
  const auto ends = [&](int stage) { return pass_bytes(plan, stage, 0).saved.ends; };
  EXPECT_EQ(ends(2), 4 * stream);
  EXPECT_EQ(ends(1) - ends(2), 8 * 4 * 512);  // and there the ids of neighbours
}

}  // namespace
}  // namespace megatron
