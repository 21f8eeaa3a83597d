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
        ActivationCase{"encoder_recomputed",
                       "--recompute-granularity selective --recompute-modules retro_encoder", 1,
                       true, 0.05},
        ActivationCase{"encoder_recomputed_tp2_sp",
                       "--recompute-granularity selective --recompute-modules retro_encoder "
                       "core_attn --tensor-model-parallel-size 2 --sequence-parallel",
                       2, true, 0.05},
        ActivationCase{"recomputed_tp2_sp",
                       "--recompute-granularity full --recompute-method uniform "
                       "--recompute-num-layers 1 --tensor-model-parallel-size 2 "
                       "--sequence-parallel",
                       2, true, 0.05, 0.14},
        ActivationCase{"tp2", "--tensor-model-parallel-size 2", 2, true, 0.05},
        ActivationCase{"tp2_sp", "--tensor-model-parallel-size 2 --sequence-parallel", 2, true,
                       0.05}),
    [](const auto& info) { return info.param.name; });

// Saved are the inputs of its layers, and it is computed twice.
TEST(RetroPlan, CountsAnEncoderThatIsComputedAgain) {
  const auto plan_of = [](const std::string& flags) {
    const Arguments a = parse(kRetroModel + kRun + flags, 1);
    return make_layout_plan(a, {500, 1024}, true, find_task(a).model_provider);
  };
  const LayerCost held = plan_of("").layer_cost(2),
                  again = plan_of(
                              "--recompute-granularity selective --recompute-modules "
                              "retro_encoder")
                              .layer_cost(2);
  EXPECT_LT(again.saved().total(), held.saved().total() / 2);
  EXPECT_GT(again.first.recomputed_products, 0.5 * again.first.weight_products());
  EXPECT_LT(again.first.recomputed_products, again.products());
  EXPECT_EQ(held.first.recomputed_products, 0);
  EXPECT_EQ(again.products(), held.products());
}

// What a run that reads neighbours may not ask for.
TEST(RetroRules, AreToldByName) {
  const auto refusal = [](const std::string& flags, int ranks) -> std::string {
    try {
      parse(flags, ranks);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const std::string& message, const std::string& flags, int ranks = 1) {
    const std::string found = refusal(flags, ranks);
    EXPECT_NE(found.find(message), std::string::npos) << found;
  };
  const std::string small =
      "--task retro --num-layers 5 --retro-chunk-length 32 --hidden-size 128 "
      "--num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
      "--micro-batch-size 2 " +
      kRun;
  expect(
      "of --num-layers 5 none reads neighbours: the first one is the 6th\n"
      "hint: more layers, or --retro-layers with their numbers",
      small);
  EXPECT_EQ(refusal(small + "--num-layers 6", 1), "");
  expect("--retro-layers names layer 7 of 5", small + "--retro-layers 2 7");
  expect(
      "--context-parallel-size above 1 with --task retro is not built: chunks would lie on several "
      "ranks\nhint: leave one of them out",
      small + "--retro-layers 2 --context-parallel-size 2", 2);
  expect("--recompute-modules retro_encoder needs --task retro",
         "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
         "--max-position-embeddings 256 --recompute-granularity selective --recompute-modules "
         "retro_encoder" +
             kRun);
}

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
