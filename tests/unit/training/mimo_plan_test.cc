// What a model that reads images holds of its largest micro-batch, next to its plan.
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_check.h"
#include "megatron/training/planning/memory_estimate.h"
#include "megatron/training/planning/module_costs.h"
#include "megatron/training/planning/step_estimate.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

const std::string kSeeingModel =
    "--task mimo --num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
    "--position-embedding-type rope --micro-batch-size 2 --attention-dropout 0 "
    "--vision-num-layers 3 --vision-hidden-size 64 --vision-ffn-hidden-size 256 "
    "--vision-num-attention-heads 4 --img-h 32 --img-w 32 --patch-dim 4 --image-token-id 600 "
    "--disable-vision-class-token ";
const std::string kClip = "--vision-model-type clip ";
#define OWN_SIZES "--pixel-shuffle --position-embedding-type mrope --mrope-section 4 2 2 "
#define SHORT "--seq-length 64 "
#define STAGES(count, layout) \
  "--pipeline-model-parallel-size " count " --pipeline-model-parallel-layout " layout " "
#define GEMMA3 "--vision-model-type siglip --vision-pooling 2 --bidirectional-images "
#define QWEN2 OWN_SIZES "--vision-model-type qwen2 "
#define QWEN2_5                                                                   \
  OWN_SIZES                                                                       \
  "--vision-model-type qwen2_5 --vision-activation silu --vision-window-size 32 " \
  "--vision-whole-picture-layers 1 "

#define TO_HOST "--encoder-offload-modules "
#define EACH_INPUT "attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act mlp_fc2 "

#define AHEAD "--mimo-encoder-prefetch --freeze vision_model"

class MimoActivations : public testing::TestWithParam<ActivationCase> {};

TEST_P(MimoActivations, AreWhatThePlanSays) { expect_planned(GetParam(), kSeeingModel + kClip); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, MimoActivations,
    testing::Values(
        ActivationCase{"clip", "", 1, true, 0.05},
        // The encoder holds most.
        ActivationCase{"large_encoder",
                       "--num-layers 1 --vision-num-layers 8 --vision-hidden-size 128", 1, true,
                       0.05},
        ActivationCase{"internvit",
                       "--vision-model-type internvit --pixel-shuffle --vision-projection-norm", 1,
                       true, 0.05},
        ActivationCase{"siglip", "--vision-model-type siglip --vision-pooling 2", 1, true, 0.05},
        ActivationCase{"in_both_directions", GEMMA3, 1, true, 0.05},
        ActivationCase{"windows_in_both_directions",
                       GEMMA3 "--window-size 64 0 --window-attn-skip-freq 2", 1, true, 0.05},
        // The mask of all pairs of tokens is a tenth of what is saved.
        ActivationCase{"large_mask",
                       GEMMA3 "--num-layers 1 --hidden-size 32 --seq-length 1024 "
                              "--freeze vision_model vision_projection",
                       1, true, 0.05},
        ActivationCase{"in_both_directions_pp2", GEMMA3 "--pipeline-model-parallel-size 2", 2, true,
                       0.05},
        ActivationCase{"in_both_directions_a2a",
                       GEMMA3 "--context-parallel-size 2 --cp-comm-type a2a", 2, true, 0.05},
        ActivationCase{"in_both_directions_gathered",
                       GEMMA3 "--context-parallel-size 2 --cp-comm-type all_gather", 2, true, 0.05},
        ActivationCase{"in_both_directions_behind_encoders", GEMMA3 STAGES("3", "V|Ettt|tL"), 3,
                       true, 0.05},
        ActivationCase{"qwen2", QWEN2 SHORT, 1, true, 0.05},
        ActivationCase{"qwen2_5", QWEN2_5 SHORT, 1, true, 0.05},
        ActivationCase{"qwen2_5_frozen", QWEN2_5 SHORT "--freeze vision_model", 1, true, 0.05},
        ActivationCase{"qwen2_5_limited", QWEN2_5 "--max-patches-per-sequence 128", 1, true, 0.05},
        ActivationCase{"qwen2_5_tp2", QWEN2_5 SHORT "--tensor-model-parallel-size 2", 2, true,
                       0.05},
        ActivationCase{"affine", "--vision-projection-type affine", 1, true, 0.05},
        ActivationCase{"frozen_encoder", "--num-layers 1 --freeze vision_model", 1, true, 0.05},
        ActivationCase{"frozen_ends", "--freeze vision_model vision_projection", 1, true, 0.05},
        ActivationCase{"recomputed",
                       "--recompute-granularity full --recompute-method uniform "
                       "--recompute-num-layers 1",
                       1, true, 0.05},
        ActivationCase{"encoder_again", "--encoder-recompute-granularity full --num-layers 1", 1,
                       true, 0.05},
        ActivationCase{"encoder_again_in_units",
                       QWEN2_5 SHORT "--vision-num-layers 5 --encoder-recompute-granularity full "
                                     "--encoder-recompute-num-layers 2",
                       1, true, 0.05},
        ActivationCase{"encoder_block_again",
                       "--num-layers 1 --vision-num-layers 8 --vision-hidden-size 128 "
                       "--encoder-recompute-granularity full --encoder-recompute-method block "
                       "--encoder-recompute-num-layers 5",
                       1, true, 0.05},
        ActivationCase{"encoder_to_host", "--num-layers 1 " TO_HOST EACH_INPUT, 1, true, 0.05},
        ActivationCase{"large_encoder_to_host",
                       "--num-layers 1 --vision-num-layers 8 --vision-hidden-size 128 " TO_HOST
                       "core_attn attn_proj mlp_act mlp_fc2",
                       1, true, 0.05},
        ActivationCase{
            "internvit_to_host",
            "--vision-model-type internvit --pixel-shuffle --num-layers 1 " TO_HOST EACH_INPUT, 1,
            true, 0.05},
        ActivationCase{"qwen2_5_to_host", QWEN2_5 SHORT TO_HOST EACH_INPUT, 1, true, 0.05},
        ActivationCase{"encoder_units_to_host",
                       "--vision-num-layers 5 --vision-hidden-size 128 --num-layers 1 "
                       "--recompute-vision --encoder-recompute-num-layers 2 " TO_HOST "attn_norm",
                       1, true, 0.05},
        ActivationCase{"encoder_block_again_to_host",
                       "--vision-num-layers 6 --vision-hidden-size 128 --num-layers 1 "
                       "--recompute-vision --encoder-recompute-method block "
                       "--encoder-recompute-num-layers 2 " TO_HOST "attn_norm core_attn mlp_act",
                       1, true, 0.05},
        ActivationCase{"all_to_host",
                       "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 "
                       "--offload-modules core_attn mlp_act " TO_HOST "core_attn mlp_act mlp_fc2",
                       1, true, 0.05},
        // Temporaries of a layer without autograd are counted roughly.
        ActivationCase{"encoder_to_host_decoder_again",
                       "--recompute-granularity full --recompute-method uniform "
                       "--recompute-num-layers 1 --ffn-hidden-size 128 --vision-hidden-size 128 "
                       "--fine-grained-offloading-max-inflight-offloads 2 " TO_HOST EACH_INPUT,
                       1, true, 0.05, 0.07},
        ActivationCase{"limited", "--max-patches-per-sequence 130", 1, true, 0.05},
        ActivationCase{"tp2", "--tensor-model-parallel-size 2", 2, true, 0.05},
        ActivationCase{"tp2_sp", "--tensor-model-parallel-size 2 --sequence-parallel", 2, true,
                       0.05},
        ActivationCase{"cp2", "--context-parallel-size 2 --cp-comm-type all_gather", 2, true, 0.05},
        ActivationCase{"divided",
                       "--num-layers 1 --vision-num-layers 5 --tensor-model-parallel-size 2 "
                       "--encoder-tensor-model-parallel-size 2",
                       2, true, 0.05},
        ActivationCase{"sp_divided_again",
                       QWEN2_5 SHORT "--tensor-model-parallel-size 2 --sequence-parallel "
                                     "--encoder-tensor-model-parallel-size 2 --recompute-vision",
                       2, true, 0.05},
        ActivationCase{"cp2_divided",
                       "--context-parallel-size 2 --tensor-model-parallel-size 2 "
                       "--encoder-tensor-model-parallel-size 2",
                       4, true, 0.05},
        ActivationCase{"cp2_tp2", "--context-parallel-size 2 --tensor-model-parallel-size 2", 4,
                       true, 0.05},
        ActivationCase{"pp2", "--pipeline-model-parallel-size 2", 2, true, 0.05},
        // Encoders on stages of their own
        ActivationCase{"v", STAGES("2", "V|Et*4L") "--vision-hidden-size 128", 2, true, 0.05},
        ActivationCase{"v_parts", STAGES("3", "V*5|V*6|V*5Et*4L") "--vision-num-layers 16", 3, true,
                       0.05},
        // The sum of a branch and the stream is counted besides the product that becomes it.
        ActivationCase{"v_parts_to_host",
                       STAGES("3", "V*5|V*6|V*5Et*4L") "--vision-num-layers 16 " TO_HOST
                                                       "core_attn attn_proj mlp_act mlp_fc2",
                       3, true, 0.05, 0.07},
        ActivationCase{"v_windows_tp2",
                       QWEN2_5 SHORT STAGES("3", "VV|V|Et*4L") "--tensor-model-parallel-size 2", 6,
                       true, 0.05}),
    [](const auto& info) { return info.param.name; });

LayoutPlan plan_of(const std::string& more, int64_t world_size = 1, bool on_gpu = true) {
  const Arguments a = parse(kSeeingModel + kRun + kClip + more, world_size);
  return make_layout_plan(a, {500, 1024}, on_gpu, find_task(a).model_provider);
}

// All that a rank allocates in a step, weights and states included.
class MimoSteps : public testing::TestWithParam<ActivationCase> {};

TEST_P(MimoSteps, AllocateWhatThePlanSays) {
  const auto& c = GetParam();
  const Arguments a = parse(kSeeingModel + kRun + kClip + c.flags, c.world_size);
  const LayoutPlan plan = plan_of(c.flags, c.world_size, /*on_gpu=*/false);
  std::mutex mutex;
  run_ranks(static_cast<int>(c.world_size), [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(a.parallel, a.encoder_ranks(), world);
    const auto real = static_cast<double>(step_peak(a, {500, 1024}, groups));
    const std::lock_guard lock(mutex);
    const bool encodes = a.encoder_ranks().holds(world->rank());
    const LayoutPlan& of = encodes ? *plan.encoders : plan;
    const auto planned = static_cast<double>(stage_memory(of, groups.pp.rank()).allocated());
    const std::string of_what =
        cat(planned, " and ", real, encodes ? " of encoders" : " of stage ", groups.pp.rank());
    EXPECT_NEAR(planned / real, 1, c.tolerance) << of_what;
    EXPECT_GE(planned / real, kLeastOfStep) << of_what;
  });
}

const std::string kSharded =
    "--use-megatron-fsdp --overlap-grad-reduce --overlap-param-gather --eval-iters 0 "
    "--global-batch-size 8 ";

const std::string kApart =
    STAGES("3", "V|VVV|Et*4L") "--vision-num-layers 4 --vision-hidden-size 128 --eval-iters 0 ";
// Encoders on ranks of their own
const std::string kOwnRanks =
    "--encoder-data-parallel-size 1 --eval-iters 0 --global-batch-size 16 ";
const std::string kOwnTensorRanks =
    "--encoder-data-parallel-size 1 --encoder-tensor-model-parallel-size 2 --vision-num-layers 4 "
    "--tensor-model-parallel-size 2 --vision-hidden-size 128 --eval-iters 0 --global-batch-size 8 ";
const std::string kOwnRanksToHost = kOwnRanks + TO_HOST "core_attn attn_proj mlp_act mlp_fc2";
const std::string kApartToHost =
    kApart + "--global-batch-size 8 " TO_HOST "core_attn attn_proj mlp_act mlp_fc2";
const std::string kApartAndFrozen = kApart + "--freeze vision_model";

INSTANTIATE_TEST_SUITE_P(
    Layouts, MimoSteps,
    testing::Values(ActivationCase{"serial", "--eval-iters 0", 1, true, 0.05},
                    ActivationCase{"windows", QWEN2_5 SHORT "--eval-iters 0", 1, true, 0.05},
                    ActivationCase{"frozen", "--eval-iters 0 --freeze vision_model", 1, true, 0.05},
                    ActivationCase{"ahead", "--eval-iters 0 --global-batch-size 8 " AHEAD, 1, true,
                                   0.05},
                    ActivationCase{"ahead_frozen_ends",
                                   "--eval-iters 0 --global-batch-size 8 --num-layers 1 " AHEAD
                                   " vision_projection",
                                   1, true, 0.05},
                    ActivationCase{"again", "--eval-iters 0 --encoder-recompute-granularity full",
                                   1, true, 0.05},
                    ActivationCase{"to_host", "--eval-iters 0 --num-layers 1 " TO_HOST EACH_INPUT,
                                   1, true, 0.05},
                    ActivationCase{"sharded", kSharded.c_str(), 2, true, 0.05},
                    ActivationCase{"own_ranks", kOwnRanks.c_str(), 3, true, 0.05},
                    ActivationCase{"own_tensor_ranks", kOwnTensorRanks.c_str(), 4, true, 0.05},
                    ActivationCase{"own_ranks_to_host", kOwnRanksToHost.c_str(), 3, true, 0.05},
                    ActivationCase{"stages", kApart.c_str(), 3, true, 0.05},
                    ActivationCase{"stages_to_host", kApartToHost.c_str(), 3, true, 0.05},
                    ActivationCase{"frozen_stages", kApartAndFrozen.c_str(), 3, true, 0.05}),
    [](const auto& info) { return info.param.name; });

// A limit of patches is one of memory.
TEST(MimoPlan, CountsTheLargestLegalMicroBatch) {
  const auto saved = [](const std::string& more) { return pass_bytes(plan_of(more), 0, 0).saved; };
  const SavedBytes whole = saved(""), half = saved("--max-patches-per-sequence 128"),
                   quarter = saved("--max-patches-per-sequence 64");
  EXPECT_EQ(saved("--max-patches-per-sequence 100000").encoder, whole.encoder);  // 4 have room
  EXPECT_EQ(2 * half.encoder, whole.encoder);
  EXPECT_EQ(4 * quarter.encoder, whole.encoder);
  EXPECT_EQ(4 * quarter.features, whole.features);
  EXPECT_EQ(half.ends, whole.ends);
}

// Of pictures of own sizes one that fills the sequence, or as many patches as are allowed.
TEST(MimoPlan, CountsPatchesOfOwnSizes) {
  const auto saved = [](const std::string& more) { return pass_bytes(plan_of(more), 0, 0).saved; };
  EXPECT_EQ(unplanned_reason(plan_of(QWEN2_5).model_config()), "");
  EXPECT_EQ(4 * saved(QWEN2_5 "--max-patches-per-sequence 256").encoder, saved(QWEN2_5).encoder);
  EXPECT_EQ(saved(QWEN2_5 "--max-patches-per-sequence 9999").encoder, saved(QWEN2_5).encoder);
  // In two layers each of 2 x 1024 patches has scores with its window of 64, not with all.
  const auto scores = [](const std::string& more) {
    const LayoutPlan plan = plan_of(more);
    return module_reports(plan)[0].forward_flops;
  };
  const double whole = scores(QWEN2_5 "--vision-whole-picture-layers 0 1 2"),
               windows = scores(QWEN2_5), rows = 2 * 1024, h = 64;
  EXPECT_EQ(whole - windows, 2 * rows * 2 * 2 * h * (1024 - 64));
}

TEST(MimoPlan, AFrozenEncoderSavesNothing) {
  const SavedBytes frozen = pass_bytes(plan_of("--freeze vision_model"), 0, 0).saved,
                   both =
                       pass_bytes(plan_of("--freeze vision_model vision_projection"), 0, 0).saved;
  EXPECT_EQ(frozen.encoder, 0);
  EXPECT_GT(frozen.features, 0);
  EXPECT_EQ(both.features, 0);
}

// Parameters, and multiply-adds next to the sum over the linears of encoder and projector.
TEST(MimoPlan, CountsModules) {
  const LayoutPlan plan = plan_of("--freeze vision_model");
  const std::vector<ModuleReport> modules = module_reports(plan);
  ASSERT_EQ(modules.size(), 3u);
  int64_t all = 0;
  for (const ModuleReport& one : modules) all += one.parameters;
  EXPECT_EQ(all, plan.model_elements);
  const int64_t h = 64, f = 256;
  const int64_t norms_and_biases = 4 * h + 3 * h + h + f + h;
  const int64_t of_layer = 4 * h * h + 2 * h * f + norms_and_biases;
  EXPECT_EQ(modules[0].name, "vision_model");
  EXPECT_EQ(modules[0].parameters, 3 * of_layer + 48 * h + h + 65 * h + 2 * h);
  EXPECT_EQ(modules[0].trained, 0);
  EXPECT_EQ(modules[0].backward_flops, 0);
  const double pictures = 8, rows = 65 * pictures;
  EXPECT_EQ(modules[0].forward_flops,
            2 * (64 * pictures * 48 * h + 3 * rows * (4 * h * h + 2 * h * f + 2 * 65 * h)));
  EXPECT_EQ(modules[1].forward_flops, 2 * 64 * pictures * (64 * 128 + 128 * 128));
  EXPECT_EQ(modules[1].backward_flops, 2 * modules[1].forward_flops);
  EXPECT_GT(modules[2].forward_ms, 0);
  EXPECT_TRUE(module_reports(make_layout_plan(parse("--num-layers 2 --hidden-size 64 "
                                                    "--num-attention-heads 4 --seq-length 32 "
                                                    "--micro-batch-size 1 " +
                                                        kRun,
                                                    1),
                                              {500, 512}))
                  .empty());
}

// Memory of layers against their time: of a frozen encoder there is none to save.
TEST(MimoPlan, CountsLayersThatAreComputedAgain) {
  const std::string again = "--encoder-recompute-granularity full ",
                    block = again + "--encoder-recompute-method block ";
  const auto saved = [](const std::string& more) {
    return pass_bytes(plan_of(more), 0, 0).saved.encoder;
  };
  const int64_t none = saved(""), one = saved(block), all = saved(again);
  EXPECT_GT(none, one);
  EXPECT_EQ(none - all, 3 * (none - one));
  const int64_t unit = 8 * 65 * 64 * 4;  // of 8 pictures, an input
  EXPECT_EQ(all - saved(again + "--encoder-recompute-num-layers 3"), 2 * unit);
  EXPECT_EQ(saved(again + "--freeze vision_model"), 0);
  const auto backward = [](const std::string& more) {
    return module_reports(plan_of(more))[0].backward_ms;
  };
  const double of_one = backward(block) - backward("");
  EXPECT_GT(of_one, 0);
  EXPECT_NEAR(backward(again) - backward(""), 3 * of_one, of_one / 100);
  EXPECT_EQ(backward(again + "--freeze vision_model"), 0);
  const auto recompute = [](const std::string& more) {
    return estimate_step(plan_of(more), {1e12, 1e11, 1e10}).recompute;
  };
  EXPECT_EQ(recompute(""), 0);
  EXPECT_GT(recompute(again), 0);
}

// What does not stay on the device is in host memory, and is reported: of tensors of any size.
TEST(MimoPlan, CountsEncodersInHostMemory) {
  const auto pass = [](const std::string& more) { return pass_bytes(plan_of(more), 0, 0); };
  const PassBytes none = pass(""), all = pass(TO_HOST EACH_INPUT), one = pass(TO_HOST "mlp_act");
  const int64_t rows = 8 * 65, h = 64, f = 256, sum = 4, element = 4;
  EXPECT_EQ(none.offloaded, 0);
  EXPECT_EQ(one.offloaded, 3 * rows * f * element);
  for (const PassBytes* const less : {&all, &one})
    EXPECT_EQ(less->saved.encoder + less->offloaded, none.saved.encoder);
  // Pixels, and the norm before the layers, stay.
  EXPECT_EQ(all.saved.encoder, 8 * 64 * 48 * element + rows * (h * element + 2 * sum));
  EXPECT_EQ(all.saved.features, none.saved.features);
  const std::string again = "--recompute-vision " TO_HOST "attn_norm";
  EXPECT_EQ(pass(again).offloaded, 3 * rows * h * element);
  EXPECT_EQ(pass(again).saved.encoder, all.saved.encoder);
  const LayoutPlan plan = plan_of(TO_HOST EACH_INPUT);
  EXPECT_GE(stage_memory(plan, 0).host_activations, all.offloaded);
  const std::string text = layout_text(plan, make_layout_report(plan));
  EXPECT_NE(text.find("in host memory: activations"), std::string::npos) << text;
}

// Each of two ranks has half of the products of its layers and all pictures, and sends.
TEST(MimoPlan, CountsDividedEncoders) {
  const std::string two = "--tensor-model-parallel-size 2 ",
                    divided = two + "--encoder-tensor-model-parallel-size 2 ";
  const auto of = [](const std::string& more) { return module_reports(plan_of(more, 2))[0]; };
  EXPECT_EQ(of(two).parameters, of(divided).parameters);
  const double conv1 = 2 * 64 * 8 * 48 * 64;
  EXPECT_EQ(of(divided).forward_flops - conv1, of(two).forward_flops - conv1 / 2);
  const auto sent = [](const std::string& more) { return plan_of(more, 2).ends.embedding.tensor; };
  const double sums = 2 * 3 * 8 * 65 * 64 * 4.0;  // of 3 layers' two branches, once each way
  EXPECT_EQ(sent(divided + "--vision-num-layers 6").forward - sent(divided).forward, sums);
  EXPECT_EQ(sent(divided).backward, sums);
  EXPECT_EQ(sent(divided + "--freeze vision_model").backward, 0);
  EXPECT_EQ(sent(divided + "--recompute-vision").backward, 2 * sums);
  const double of_features = 8 * 64 * 128 * 4.0;
  // In the place of a reduce-scatter an all-reduce
  const std::string sp = "--sequence-parallel";
  EXPECT_EQ(sent(divided + sp).backward - sent(two + sp).backward, sums + of_features / 2);
}

// On a stage with a frozen encoder: features of so many micro-batches, not more than a step has;
// on a GPU with what the encoder allocates on its own stream.
TEST(MimoPlan, CountsFeaturesAhead) {
  const std::string batches = "--global-batch-size 8 ";
  const auto ahead = [&](const std::string& more, bool on_gpu = false) {
    return stage_memory(plan_of(batches + more, 1, on_gpu), 0).features_ahead;
  };
  const int64_t features = 8 * 64 * 64 * 4;  // of 8 pictures, 64 wide
  const std::string depth = AHEAD " --mimo-encoder-prefetch-depth ";
  EXPECT_EQ(ahead("--freeze vision_model"), 0);
  EXPECT_EQ(ahead(depth + "2"), 2 * features);
  EXPECT_EQ(ahead(depth + "9"), 3 * features);  // of four, one computes
  EXPECT_GT(ahead(depth + "1", /*on_gpu=*/true), 2 * features);
  const LayoutPlan two = plan_of(batches + AHEAD " --pipeline-model-parallel-size 2", 2);
  EXPECT_GT(stage_memory(two, 0).features_ahead, 0);
  EXPECT_EQ(stage_memory(two, 1).features_ahead, 0);
  const std::string text = layout_text(two, make_layout_report(two));
  EXPECT_NE(text.find("features ahead"), std::string::npos) << text;
}

// On stages of their own: what all have is what one has, and only the stage before the embedding
// passes features on.
TEST(MimoPlan, CountsPartsOfEncoders) {
  const std::string parts = STAGES("3", "V|VV|Et*4L");
  const LayoutPlan plan = plan_of(parts, 3), one = plan_of("");
  const auto saved = [&](int stage) { return pass_bytes(plan, stage, 0).saved; };
  const SavedBytes whole = pass_bytes(one, 0, 0).saved;
  EXPECT_EQ(saved(0).encoder + saved(1).encoder, whole.encoder);
  EXPECT_EQ(saved(1).features + saved(2).features, whole.features);
  EXPECT_EQ(saved(0).features + saved(2).encoder + saved(0).ends, 0);
  const int64_t rows = 8 * 65 * 64 * 4, features = 8 * 64 * 128 * 4;
  EXPECT_EQ(plan.transfer_bytes(0), rows);
  EXPECT_EQ(plan.transfer_bytes(1), std::max(rows, features));
  EXPECT_EQ(plan.border_bytes(-1), features);
  EXPECT_EQ(pass_bytes(plan_of(parts + "--freeze vision_model", 3), 1, 0).saved.encoder, 0);
  const auto work = [](const LayoutPlan& of) {
    double all = 0;
    for (const auto& stage : compute_costs(of).passes) all += stage.front().forward;
    return all;
  };
  EXPECT_NEAR(work(plan), work(one), 1e-9);
  EXPECT_NE(layout_text(plan, make_layout_report(plan)).find("V2-3"), std::string::npos);
}

// On ranks of their own encoders have the pictures of all replicas between them, nobody else any.
TEST(MimoPlan, CountsOwnRanks) {
  const LayoutPlan one = plan_of(""), two = plan_of("--encoder-data-parallel-size 2", 4);
  ASSERT_NE(two.encoders, nullptr);
  const SavedBytes all = pass_bytes(one, 0, 0).saved, media = pass_bytes(*two.encoders, 0, 0).saved,
                   language = pass_bytes(two, 0, 0).saved;
  EXPECT_EQ(media.encoder, all.encoder);  // two micro-batches over two ranks
  EXPECT_EQ(media.features + language.features, all.features);
  EXPECT_EQ(language.encoder, 0);
  EXPECT_EQ(two.border_bytes(-1), 8 * 64 * 128 * 4);
  const LayoutReport report = make_layout_report(two);
  EXPECT_EQ(report.encoders->logical_parameters + report.stages[0].logical_parameters,
            one.model_elements);
  const std::string text = layout_text(two, report);
  for (const char* part :
       {"4 ranks = encoders tp 1 x dp 2 + language model tp 1 x cp 1 x pp 1 x dp 2",
        "memory of a rank of the encoders", "encoders dp"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(MimoPlan, IsReported) {
  const LayoutPlan plan = plan_of("");
  const std::string text = layout_text(plan, make_layout_report(plan));
  for (const char* part : {"  vision_model", "  vision_projection", "encoder of media",
                           "features of media", "forward TFLOP", "  language_model"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

// Kernels of GPUs know which tokens are of one image: no layer has a mask, and temporaries of those
// tokens are there beside causal attention. Other kernels have a mask.
TEST(MimoPlan, CountsImagesInBothDirectionsOnGpus) {
  const std::string causal_model =
                        "--vision-model-type siglip --vision-pooling 2 --qk-layernorm --num-layers "
                        "1 --vision-num-layers 1 --seq-length 1024 ",
                    model = causal_model + "--bidirectional-images ", bf16 = "--bf16 ";
  const auto saved = [](const LayoutPlan& of) { return pass_bytes(of, 0, 0).saved.total(); };
  const auto temporaries = [](const LayoutPlan& of) {
    return of.layer_cost(1, /*offloaded=*/false).unrecorded_peak();
  };
  const LayoutPlan causal = plan_of(causal_model + bf16), blocks = plan_of(model + bf16);
  constexpr int64_t kTokens = 2 * 1024, kMask = kTokens * 1024;
  EXPECT_EQ(blocks.ends.media - causal.ends.media, 3 * 8 * kTokens);
  EXPECT_EQ(saved(blocks), saved(causal));
  EXPECT_GT(temporaries(blocks), temporaries(causal));
  const LayoutPlan unfused = plan_of(model + bf16 + "--attention-backend unfused");
  EXPECT_EQ(unfused.ends.passed_beside, kMask);
  EXPECT_EQ(plan_of(model).ends.passed_beside, kMask);
  EXPECT_EQ(blocks.ends.passed_beside, 0);
}

// Tiles of an image have fewer tokens than features: tokens do not limit pictures.
TEST(MimoPlan, NeedsALimitOfTiles) {
  EXPECT_EQ(unplanned_reason(plan_of("--bidirectional-images").model_config()), "");
  const std::string tiles = "--vision-newlines ";
  EXPECT_NE(unplanned_reason(plan_of(tiles).model_config()), "");
  EXPECT_EQ(unplanned_reason(plan_of(tiles + "--max-patches-per-sequence 320").model_config()), "");
}

}  // namespace
}  // namespace megatron
