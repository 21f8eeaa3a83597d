// What a model that hears holds of its largest micro-batch, next to its plan.
#include <gtest/gtest.h>

#include "megatron/models/mimo/mimo_config.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_check.h"
#include "megatron/training/planning/memory_estimate.h"
#include "megatron/training/planning/module_costs.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

const std::string kHearingModel =
    "--task mimo --num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
    "--position-embedding-type rope --micro-batch-size 2 --attention-dropout 0 "
    "--audio-model-type whisper --audio-num-layers 3 --audio-hidden-size 64 "
    "--audio-ffn-hidden-size 256 --audio-num-attention-heads 4 --audio-mel-bins 16 "
    "--audio-token-id 600 ";
#define EACH_TO_HOST                                                             \
  "--encoder-offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm " \
  "mlp_fc1 mlp_act mlp_fc2 "
#define STACKED                                                        \
  "--seq-length 400 --micro-batch-size 1 --audio-features stacked "    \
  "--audio-projection-type mlp --audio-projection-ffn-hidden-size 96 " \
  "--disable-audio-projection-bias "

class SoundActivations : public testing::TestWithParam<ActivationCase> {};

TEST_P(SoundActivations, AreWhatThePlanSays) { expect_planned(GetParam(), kHearingModel); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, SoundActivations,
    testing::Values(
        ActivationCase{"means", "", 1, true, 0.05},
        ActivationCase{"stacked", STACKED, 1, true, 0.05},
        ActivationCase{"large_encoder",
                       "--num-layers 1 --audio-num-layers 6 --audio-hidden-size 128", 1, true,
                       0.05},
        ActivationCase{"two_projected", "--audio-projection-type mlp", 1, true, 0.05},
        ActivationCase{"frozen_encoder", "--num-layers 1 --freeze audio_model", 1, true, 0.05},
        ActivationCase{"frozen_ends", "--freeze audio_model audio_projection", 1, true, 0.05},
        ActivationCase{"again", "--num-layers 1 --recompute-vision", 1, true, 0.05},
        ActivationCase{"to_host", "--num-layers 1 " EACH_TO_HOST, 1, true, 0.05},
        ActivationCase{"stacked_block_again_to_host",
                       STACKED "--recompute-vision --encoder-recompute-method block " EACH_TO_HOST,
                       1, true, 0.05},
        ActivationCase{"tp2_sp", "--tensor-model-parallel-size 2 --sequence-parallel", 2, true,
                       0.05},
        ActivationCase{"cp2", "--context-parallel-size 2 --cp-comm-type all_gather", 2, true, 0.05},
        ActivationCase{"divided",
                       "--num-layers 1 --tensor-model-parallel-size 2 "
                       "--encoder-tensor-model-parallel-size 2",
                       2, true, 0.05},
        ActivationCase{"pp2", "--pipeline-model-parallel-size 2", 2, true, 0.05},
        ActivationCase{"v_parts",
                       "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout "
                       "V*3|V*3|V*2Et*2L --audio-num-layers 8",
                       3, true, 0.05}),
    [](const auto& info) { return info.param.name; });

LayoutPlan sound_plan(const std::string& flags, bool on_gpu = true) {
  const Arguments a = parse(flags + kRun, 1);
  return make_layout_plan(a, {500, 1024}, on_gpu, find_task(a).model_provider);
}

// All that a rank allocates in a step, weights and states included.
TEST(SoundPlan, CountsAStep) {
  const std::string flags = kHearingModel + "--eval-iters 0 ";
  const Arguments a = parse(flags + kRun, 1);
  const auto real = static_cast<double>(step_peak(a, {500, 1024}, ParallelGroups()));
  const auto planned = static_cast<double>(stage_memory(sound_plan(flags, false), 0).allocated());
  EXPECT_NEAR(planned / real, 1, 0.05) << planned << " and " << real;
  EXPECT_GE(planned / real, kLeastOfStep) << planned << " and " << real;
}

// Parameters, and multiply-adds next to the sum over the linears.
TEST(SoundPlan, CountsModules) {
  const LayoutPlan plan = sound_plan(kHearingModel + "--freeze audio_model");
  const std::vector<ModuleReport> modules = module_reports(plan);
  ASSERT_EQ(modules.size(), 3U);
  int64_t all = 0;
  for (const ModuleReport& one : modules) all += one.parameters;
  EXPECT_EQ(all, plan.model_elements);
  const double h = 64, f = 256, rows = 2 * 512;
  EXPECT_EQ(modules[0].name, "audio_model");
  EXPECT_EQ(modules[0].backward_flops, 0);
  EXPECT_EQ(modules[0].forward_flops,
            2 * rows * (6 * 16 * h + 3 * h * h + 3 * (4 * h * h + 2 * h * f + 2 * 512 * h)));
  EXPECT_EQ(modules[1].forward_flops, 2 * 512 * h * 128);
  EXPECT_EQ(modules[1].backward_flops, 2 * modules[1].forward_flops);
}

// Of images and sounds the ones that hold more fill the worst micro-batch.
TEST(SoundPlan, TakesTheLargerOfImagesAndSounds) {
  const std::string images =
      "--vision-model-type clip --vision-num-layers 3 --vision-hidden-size 64 "
      "--vision-ffn-hidden-size 256 --vision-num-attention-heads 4 --img-h 32 --img-w 32 "
      "--patch-dim 4 --image-token-id 601 --disable-vision-class-token ";
  const auto saved = [](const std::string& flags) {
    return pass_bytes(sound_plan(flags), 0, 0).saved;
  };
  const SavedBytes heard = saved(kHearingModel), both = saved(kHearingModel + images),
                   seen = saved(kHearingModel + images + "--audio-model-type none"),
                   large = saved(kHearingModel + images + "--vision-hidden-size 256");
  EXPECT_GT(heard.encoder, seen.encoder);
  EXPECT_EQ(both.total(), heard.total());
  EXPECT_EQ(both.encoder, heard.encoder);
  EXPECT_GT(large.encoder, heard.encoder);
  EXPECT_EQ(module_reports(sound_plan(kHearingModel + images)).size(), 5U);
  const auto in_host_memory = [](const std::string& flags) {
    return pass_bytes(sound_plan(flags + EACH_TO_HOST), 0, 0).offloaded;
  };
  EXPECT_GT(in_host_memory(kHearingModel), 0);
  EXPECT_EQ(in_host_memory(kHearingModel + images), in_host_memory(kHearingModel));
}

}  // namespace
}  // namespace megatron
