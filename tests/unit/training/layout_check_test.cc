#include "megatron/training/planning/layout_check.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <random>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/batch.h"
#include "megatron/training/passes.h"
#include "megatron/training/planning/layout_verdict.h"
#include "megatron/training/setup.h"
#include "megatron/training/start_notes.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

using testing::HasSubstr;

const std::string kTiny =
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2" +
    kRun;

// -- parameters

// A configuration that a generator of random numbers chooses, and its ranks.
struct Chosen {
  std::string flags;
  int64_t world_size;
};

template <class T>
T one_of(std::mt19937& random, std::initializer_list<T> values) {
  return *(values.begin() + static_cast<std::ptrdiff_t>(random() % values.size()));
}

Chosen random_configuration(std::mt19937& random) {
  const int tp = one_of(random, {1, 2, 4}), pp = one_of(random, {1, 2, 3}),
            cp = one_of(random, {1, 2}), dp = one_of(random, {1, 2});
  const int chunks = pp > 1 ? one_of(random, {1, 2}) : 1;
  const int layers = pp * chunks * one_of(random, {1, 2});
  std::string flags =
      cat("--num-layers ", layers,
          " --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1", kRun,
          " --global-batch-size ", 6 * dp, " --tensor-model-parallel-size ", tp,
          " --pipeline-model-parallel-size ", pp, " --context-parallel-size ", cp);
  if (chunks > 1) flags += cat(" --num-virtual-stages-per-pipeline-rank ", chunks);
  if (pp > 1 && chunks == 2 && random() % 2) flags += " --pipeline-schedule zb-v";
  if (tp > 1 && random() % 2) flags += " --sequence-parallel";
  flags += one_of<const char*>(random, {"", " --untie-embeddings-and-output-weights"});
  flags += one_of<const char*>(random, {"", " --swiglu", " --squared-relu"});
  flags += one_of<const char*>(random, {"", " --group-query-attention --num-query-groups 2",
                                        " --group-query-attention --num-query-groups 4"});
  flags += one_of<const char*>(random, {"", " --position-embedding-type rope"});
  flags += one_of<const char*>(random, {"", " --normalization RMSNorm"});
  flags += one_of<const char*>(
      random, {"", " --disable-bias-linear", " --disable-bias-linear --add-qkv-bias"});
  flags += one_of<const char*>(random, {"", " --qk-layernorm"});
  flags += one_of<const char*>(random, {"", " --bf16"});
  flags += one_of<const char*>(random, {"", " --optimizer sgd"});
  if (random() % 4 == 0) flags += " --optimizer-cpu-offload";
  if (random() % 3 == 0)
    flags += one_of<const char*>(
        random,
        {" --lora-rank 4", " --lora-rank 2 --lora-targets linear_qkv linear_fc1 linear_proj",
         " --lora-rank 3 --lora-targets q_proj k_proj v_proj down_proj"});
  else if (random() % 2 == 0)
    flags += one_of<const char*>(random,
                                 {" --freeze embedding *.linear_fc1", " --freeze decoder.layers.0",
                                  " --freeze-except *.layers.0.mlp", " --freeze-all-layers"});
  flags += one_of<const char*>(
      random, {"", "", " --use-distributed-optimizer",
               " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
               " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
               " --use-distributed-optimizer --ddp-bucket-size 5000",
               " --overlap-grad-reduce --ddp-num-buckets 3"});
  if (pp == 2 && chunks == 1 && flags.find("--untie") != std::string::npos && random() % 2)
    flags += " --pipeline-vocab-parallel";
  return {flags, int64_t{tp} * pp * cp * dp};
}

// Compares the memory of what a rank of the configuration builds with the plan.
void compare_with_real_rank(const LayoutPlan& plan, const std::shared_ptr<Backend>& world) {
  const Arguments& a = plan.arguments;
  const ParallelGroups groups = make_parallel_groups(a.parallel, world);
  const PretrainTask task = gpt_task();
  const int stage = groups.pp.rank();
  const TrainedModel model = build_model(task, a, plan.vocabulary, groups, model_dtype(a.optimizer),
                                         c10::kCPU, StartPoint{});
  const StageMemory memory = stage_memory(plan, stage);
  int64_t weights = 0, gradients = 0;
  for (size_t chunk = 0; chunk < model.chunks.size(); ++chunk) {
    weights += static_cast<int64_t>(model.chunks[chunk].store->flat_values().nbytes());
    gradients += static_cast<int64_t>(model.chunks[chunk].store->flat_grads().nbytes());
  }
  EXPECT_EQ(memory.weights, weights);
  EXPECT_EQ(memory.gradients, gradients);
  const auto meter = std::make_shared<Meter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  const Optimizer optimizer(a.optimizer, model.optimizer->schedule(), model.stores());
  // What cannot be known by stage: where the edges of shards cut parameters into more blocks; and
  // the record of the step.
  EXPECT_NEAR(static_cast<double>(memory.optimizer_states), static_cast<double>(meter->live),
              0.002 * static_cast<double>(meter->live) + 2048);
}

TEST(LayoutPlan, WeightsGradientsAndStatesAreThoseOfTheRealRanks) {
  std::mt19937 random(7);
  for (int i = 0; i < 24; ++i) {
    const Chosen chosen = random_configuration(random);
    SCOPED_TRACE(cat(chosen.world_size, " ranks: ", chosen.flags));
    const Arguments arguments = parse(chosen.flags, chosen.world_size);
    const LayoutPlan plan = make_layout_plan(arguments, {500, 1024}, /*on_gpu=*/false);
    run_ranks(static_cast<int>(chosen.world_size),
              [&](const std::shared_ptr<Backend>& world) { compare_with_real_rank(plan, world); });
  }
}

TEST(LayoutPlan, StagesHoldTheWholeModel) {
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) {
    const Chosen chosen = random_configuration(random);
    const LayoutPlan plan = make_layout_plan(parse(chosen.flags, chosen.world_size), {500, 1024});
    const LayoutReport report = make_layout_report(plan);  // checks the sums
    EXPECT_EQ(report.stage_layers, plan.model().num_layers) << chosen.flags;
    EXPECT_EQ(report.stage_parameters, report.parameters) << chosen.flags;
  }
}

TEST(LayoutPlan, KnownModels) {
  // Brown et al. 2020, table 2.1: 174.6 billion parameters.
  const Arguments gpt3 = parse(
      "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
      "--micro-batch-size 1 "
      "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50257",
      1);
  EXPECT_NEAR(static_cast<double>(make_layout_plan(gpt3, {50257, 50304}).model_elements), 174.6e9,
              0.1e9);
}

// -- activations

class SavedActivations : public testing::TestWithParam<ActivationCase> {};

#define LATENT                                                                           \
  "--multi-latent-attention --kv-lora-rank 48 --qk-head-dim 24 --qk-pos-emb-head-dim 8 " \
  "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "

TEST_P(SavedActivations, AreWhatThePlanSays) { expect_planned(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    Layouts, SavedActivations,
    testing::Values(
        ActivationCase{"serial", "--micro-batch-size 1"},
        ActivationCase{"two_samples", "--micro-batch-size 2"},
        ActivationCase{"no_dropout", "--micro-batch-size 2 --hidden-dropout 0"},
        ActivationCase{"multipliers",
                       "--micro-batch-size 2 --hidden-dropout 0 --residual-multiplier 0.5 "
                       "--embedding-multiplier 3 --logits-scaling 4"},
        ActivationCase{"multipliers_dropout",
                       "--micro-batch-size 2 --hidden-dropout 0.1 --residual-multiplier 0.5"},
        ActivationCase{
            "llama",
            "--micro-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope "
            "--disable-bias-linear --group-query-attention --num-query-groups 2 "
            "--untie-embeddings-and-output-weights"},
        ActivationCase{"linear_loss",
                       "--micro-batch-size 2 --cross-entropy-fusion-impl linear "
                       "--cross-entropy-chunk-tokens 100"},
        ActivationCase{"mtp", "--micro-batch-size 2 --mtp-num-layers 2"},
        ActivationCase{"mtp_llama",
                       "--micro-batch-size 2 --swiglu --normalization RMSNorm "
                       "--position-embedding-type rope --disable-bias-linear "
                       "--untie-embeddings-and-output-weights --mtp-num-layers 1"},
        ActivationCase{"mtp_tp2_sp",
                       "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
                       "--mtp-num-layers 2",
                       2},
        ActivationCase{"mtp_tp2",
                       "--micro-batch-size 2 --tensor-model-parallel-size 2 --mtp-num-layers 2", 2},
        ActivationCase{"mtp_pp2",
                       "--micro-batch-size 2 --pipeline-model-parallel-size 2 --mtp-num-layers 2",
                       2},
        ActivationCase{"mtp_linear_loss",
                       "--micro-batch-size 2 --cross-entropy-fusion-impl linear "
                       "--cross-entropy-chunk-tokens 100 --mtp-num-layers 2"},
        ActivationCase{
            "mtp_full",
            "--micro-batch-size 2 --recompute-granularity full --recompute-method uniform "
            "--mtp-num-layers 2"},
        ActivationCase{"linear_loss_tp2_sp",
                       "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
                       "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 128",
                       2},
        ActivationCase{"one_group",
                       "--micro-batch-size 2 --group-query-attention --num-query-groups 1"},
        ActivationCase{"head_norms",
                       "--micro-batch-size 1 --qk-layernorm --position-embedding-type rope"},
        ActivationCase{
            "head_norms_grouped",
            "--micro-batch-size 1 --qk-layernorm --group-query-attention --num-query-groups 2"},
        ActivationCase{"bf16", "--micro-batch-size 2 --bf16", 1, false},
        ActivationCase{"wide_residual", "--micro-batch-size 2 --bf16 --fp32-residual-connection", 1,
                       false},
        ActivationCase{"unfused", "--micro-batch-size 2 --attention-backend unfused", 1, true,
                       0.05},
        ActivationCase{"selective",
                       "--micro-batch-size 2 --recompute-granularity selective --recompute-modules "
                       "core_attn layernorm"},
        ActivationCase{
            "mlp",
            "--micro-batch-size 2 --recompute-granularity selective --recompute-modules mlp"},
        ActivationCase{
            "mlp_act",
            "--micro-batch-size 2 --recompute-granularity selective --recompute-modules mlp_act"},
        ActivationCase{
            "mlp_act_gated",
            "--micro-batch-size 2 --swiglu --disable-bias-linear --recompute-granularity selective "
            "--recompute-modules mlp_act layernorm"},
        ActivationCase{
            "mlp_and_others",
            "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --swiglu "
            "--recompute-granularity selective --recompute-modules mlp core_attn layernorm",
            2},
        ActivationCase{
            "mlp_pipeline",
            "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
            "--recompute-granularity selective --recompute-modules mlp",
            2},
        ActivationCase{"full",
                       "--micro-batch-size 2 --recompute-granularity full --recompute-method "
                       "uniform --recompute-num-layers 1"},
        ActivationCase{"full_by_two",
                       "--micro-batch-size 2 --recompute-granularity full --recompute-method "
                       "uniform --recompute-num-layers 2"},
        ActivationCase{"block",
                       "--micro-batch-size 2 --recompute-granularity full --recompute-method block "
                       "--recompute-num-layers 3"},
        ActivationCase{"tensor", "--micro-batch-size 2 --tensor-model-parallel-size 2", 2},
        ActivationCase{"sequence",
                       "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
                       2},
        ActivationCase{"sequence_wide_residual",
                       "--micro-batch-size 1 --bf16 --tensor-model-parallel-size 2 "
                       "--sequence-parallel --fp32-residual-connection",
                       2, false, 0.05},
        ActivationCase{"shared_groups",
                       "--micro-batch-size 1 --tensor-model-parallel-size 4 "
                       "--group-query-attention --num-query-groups 2",
                       4},
        ActivationCase{
            "pipeline",
            "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", 2},
        ActivationCase{"attention_peak",
                       "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size "
                       "8 --ffn-hidden-size 64",
                       2},
        ActivationCase{"attention_peak_grouped",
                       "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size "
                       "8 --ffn-hidden-size 64 "
                       "--group-query-attention --num-query-groups 2",
                       2},
        ActivationCase{"pipeline_full",
                       "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size "
                       "8 --recompute-granularity full "
                       "--recompute-method uniform",
                       2},
        ActivationCase{
            "distributed_inputs",
            "--micro-batch-size 2 --tensor-model-parallel-size 4 --recompute-granularity full "
            "--recompute-num-layers 2 --distribute-saved-activations",
            4},
        ActivationCase{
            "distributed_inputs_pipeline",
            "--micro-batch-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
            "--global-batch-size 8 --recompute-granularity full --distribute-saved-activations",
            4},
        ActivationCase{"offloaded",
                       "--micro-batch-size 2 --fine-grained-activation-offloading "
                       "--min-offloaded-tensor-size 1000 "
                       "--offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm "
                       "mlp_fc1 mlp_act mlp_fc2"},
        ActivationCase{"offloaded_two_in_flight",
                       "--micro-batch-size 2 --fine-grained-activation-offloading "
                       "--min-offloaded-tensor-size 1000 "
                       "--offload-modules "
                       "core_attn attn_proj mlp_act mlp_fc2 "
                       "--fine-grained-offloading-max-inflight-offloads 2"},
        ActivationCase{
            "offloaded_mlp_llama",
            "--micro-batch-size 2 --swiglu --normalization RMSNorm --position-embedding-type rope "
            "--disable-bias-linear "
            "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
            "--fine-grained-activation-offloading --min-offloaded-tensor-size 1000 "
            "--offload-modules "
            "core_attn mlp_act"},
        ActivationCase{"offloaded_and_recomputed",
                       "--micro-batch-size 2 --fine-grained-activation-offloading "
                       "--min-offloaded-tensor-size 1000 "
                       "--offload-modules "
                       "core_attn attn_proj mlp_norm --recompute-granularity selective "
                       "--recompute-modules mlp layernorm"},
        ActivationCase{"offloaded_inputs",
                       "--micro-batch-size 2 --fine-grained-activation-offloading "
                       "--min-offloaded-tensor-size 1000 "
                       "--offload-modules "
                       "attn_norm --recompute-granularity full"},
        ActivationCase{
            "offloaded_half",
            "--micro-batch-size 2 --fine-grained-activation-offloading --min-offloaded-tensor-size "
            "1000 "
            "--activation-offload-fraction 0.5 --offload-modules core_attn mlp_act mlp_fc2"},
        ActivationCase{
            "offloaded_layers",
            "--micro-batch-size 2 --cpu-offloading-num-layers 2 --min-offloaded-tensor-size 1000"},
        ActivationCase{
            "offloaded_pipeline",
            "--micro-batch-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
            "--min-offloaded-tensor-size 1000 "
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj mlp_act "
            "mlp_fc2",
            2},
        ActivationCase{"latent", LATENT
                       "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim 32"},
        ActivationCase{"latent_narrow",
                       LATENT "--micro-batch-size 2 --v-head-dim 16 --ffn-hidden-size 64"},
        ActivationCase{"latent_tensor",
                       LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim "
                              "16 --tensor-model-parallel-size 2",
                       2},
        ActivationCase{"latent_sequence",
                       LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim "
                              "32 --tensor-model-parallel-size 2 --sequence-parallel",
                       2},
        ActivationCase{"latent_sequence_direct",
                       LATENT "--micro-batch-size 2 --v-head-dim 32 --tensor-model-parallel-size 2 "
                              "--sequence-parallel",
                       2},
        ActivationCase{"latent_bf16",
                       LATENT "--micro-batch-size 2 --q-lora-rank 40 --bf16 --v-head-dim 32", 1,
                       false},
        ActivationCase{"latent_wide_residual",
                       LATENT
                       "--micro-batch-size 2 --bf16 --fp32-residual-connection --v-head-dim 32",
                       1, false},
        ActivationCase{
            "latent_selective",
            LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim 32 "
                   "--recompute-granularity selective --recompute-modules core_attn layernorm mlp"},
        ActivationCase{"latent_up_projections", LATENT
                       "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim 32 "
                       "--recompute-granularity selective --recompute-modules mla_up_proj"},
        ActivationCase{"latent_up_projections_direct",
                       LATENT
                       "--micro-batch-size 2 --v-head-dim 16 --tensor-model-parallel-size 2 "
                       "--sequence-parallel --ffn-hidden-size 64 --recompute-granularity selective "
                       "--recompute-modules mla_up_proj layernorm",
                       2},
        ActivationCase{"latent_full", LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm "
                                             "--v-head-dim 32 --recompute-granularity full"},
        ActivationCase{
            "latent_attention_peak",
            LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim 32 "
                   "--pipeline-model-parallel-size 2 --global-batch-size 8 --ffn-hidden-size 64",
            2},
        ActivationCase{"latent_offloaded",
                       LATENT "--micro-batch-size 2 --q-lora-rank 40 --qk-layernorm --v-head-dim "
                              "16 --fine-grained-activation-offloading --min-offloaded-tensor-size "
                              "1000 --offload-modules attn_norm qkv_linear core_attn attn_proj"},
        ActivationCase{"latent_ring",
                       LATENT "--micro-batch-size 1 --v-head-dim 16 --context-parallel-size 2", 2,
                       true, 0.05},
        ActivationCase{
            "latent_exchanged",
            LATENT
            "--micro-batch-size 1 --v-head-dim 16 --context-parallel-size 2 --cp-comm-type a2a",
            2},
        ActivationCase{"ring", "--micro-batch-size 1 --context-parallel-size 2 --cp-comm-type p2p",
                       2},
        ActivationCase{"gathered_keys",
                       "--micro-batch-size 2 --context-parallel-size 2 --cp-comm-type all_gather",
                       2, false},
        ActivationCase{"exchanged_heads",
                       "--micro-batch-size 1 --context-parallel-size 2 --cp-comm-type a2a", 2}),
    [](const auto& info) { return info.param.name; });

// Each part that is recomputed makes a pass hold less, as the allocator counts.
TEST(SavedActivations, RecomputedPartsAreNotHeld) {
  const auto saved = [](const std::string& flags) {
    const Arguments a = parse(kMeasuredModel + kRun + "--micro-batch-size 1 --swiglu " + flags, 1);
    const ParallelGroups one;
    return measure(a, 1024, make_layout_plan(a, {500, 1024}, false).stages.slice(0, 0), one).saved;
  };
  const std::string selective = "--recompute-granularity selective --recompute-modules ";
  const int64_t all = saved(""), core = saved("--recompute-activations"),
                norms = saved(selective + "layernorm"), act = saved(selective + "mlp_act"),
                mlp = saved(selective + "mlp");
  EXPECT_EQ(core, saved(selective + "core_attn"));
  constexpr int64_t kRows = 256, kLayers = 4, kFfn = 320;  // 8/3 of 128, by 64
  EXPECT_EQ(all - core, kLayers * kRows * 8 * 4)
      << "log-sum-exp of 8 heads; the output is linear_proj's input";
  EXPECT_EQ(all - norms, kLayers * 2 * kRows * 128 * 4);
  EXPECT_EQ(all - act, kLayers * kRows * kFfn * 4);
  EXPECT_EQ(all - mlp, kLayers * kRows * (3 * kFfn + 128 + 2) * 4);
}

// -- the schedule's peak

TEST(StageMemory, PassesInFlightAreThoseOfTheSchedule) {
  const LayoutPlan plan = make_layout_plan(
      parse(kTiny + "--pipeline-model-parallel-size 4 --global-batch-size 16", 4), {500, 1024});
  for (int stage = 0; stage < 4; ++stage)
    EXPECT_EQ(stage_memory(plan, stage).passes_in_flight, std::vector<int>{4 - stage});
  const LayoutPlan gpipe = make_layout_plan(
      parse(kTiny +
                "--pipeline-model-parallel-size 4 --global-batch-size 16 --pipeline-schedule gpipe",
            4),
      {500, 1024});
  EXPECT_EQ(stage_memory(gpipe, 0).passes_in_flight, std::vector<int>{8});
}

// A whole training step of every stage, model and optimizer included, against what the allocator
// counts.
class TrainingPeak : public testing::TestWithParam<ActivationCase> {};

TEST_P(TrainingPeak, IsWhatThePlanSays) {
  const Arguments a = parse(
      "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
      "--attention-dropout 0 "
      "--micro-batch-size 1 " +
          kRun + GetParam().flags,
      GetParam().world_size);
  const LayoutPlan plan = make_layout_plan(a, {500, 1024}, /*on_gpu=*/false);
  std::mutex mutex;
  run_ranks(static_cast<int>(GetParam().world_size), [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups(a.parallel, world);
    const auto real = static_cast<double>(step_peak(a, plan.vocabulary, groups));
    const StageMemory memory = stage_memory(plan, groups.pp.rank());
    const std::lock_guard lock(mutex);
    const auto planned = static_cast<double>(memory.allocated());
    EXPECT_GE(planned, 0.98 * real) << "stage " << groups.pp.rank();
    EXPECT_LE(planned, 1.05 * real) << "stage " << groups.pp.rank();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, TrainingPeak,
    testing::Values(
        ActivationCase{"one_rank", "--global-batch-size 4"},
        ActivationCase{"linear_loss",
                       "--global-batch-size 4 --cross-entropy-fusion-impl linear "
                       "--cross-entropy-chunk-tokens 64"},
        ActivationCase{
            "zb_h1_linear_loss",
            "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule zb-h1 "
            "--cross-entropy-fusion-impl linear --cross-entropy-chunk-tokens 64",
            4},
        ActivationCase{"one_f_one_b", "--pipeline-model-parallel-size 4 --global-batch-size 8", 4},
        ActivationCase{
            "gpipe",
            "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule gpipe", 4},
        ActivationCase{
            "vocabulary_over_stages",
            "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-vocab-parallel "
            "--untie-embeddings-and-output-weights",
            4},
        ActivationCase{
            "vocabulary_over_stages_and_tensor_ranks",
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--global-batch-size 8 --pipeline-vocab-parallel --untie-embeddings-and-output-weights "
            "--no-peer-copies",
            4},
        ActivationCase{"mtp", "--global-batch-size 4 --mtp-num-layers 2"},
        ActivationCase{"mtp_pp4",
                       "--pipeline-model-parallel-size 4 --global-batch-size 8 --mtp-num-layers 1",
                       4},
        ActivationCase{"mtp_zb_h1",
                       "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule "
                       "zb-h1 --mtp-num-layers 2",
                       4},
        ActivationCase{"mtp_sharded_parameters",
                       "--global-batch-size 8 --use-megatron-fsdp --mtp-num-layers 2", 4},
        ActivationCase{"interleaved",
                       "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                       "--global-batch-size 8",
                       2},
        ActivationCase{
            "zb_h1",
            "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule zb-h1", 4},
        ActivationCase{"zb_v",
                       "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                       "--global-batch-size 8 "
                       "--pipeline-schedule zb-v",
                       2},
        ActivationCase{"latent_zb_h1",
                       LATENT
                       "--pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule "
                       "zb-h1 --q-lora-rank 40 --qk-layernorm --v-head-dim 32",
                       4},
        ActivationCase{
            "full_recomputation",
            "--pipeline-model-parallel-size 4 --global-batch-size 8 --recompute-granularity full "
            "--recompute-method uniform",
            4},
        ActivationCase{"mlp_recomputation",
                       "--pipeline-model-parallel-size 4 --global-batch-size 8 "
                       "--recompute-granularity selective "
                       "--recompute-modules mlp",
                       4},
        ActivationCase{"offloading",
                       "--pipeline-model-parallel-size 4 --global-batch-size 8 "
                       "--fine-grained-activation-offloading "
                       "--min-offloaded-tensor-size 1000 --offload-modules core_attn attn_proj "
                       "mlp_act mlp_fc2",
                       4},
        ActivationCase{"cpu_optimizer", "--global-batch-size 4 --optimizer-cpu-offload"},
        ActivationCase{"sharded_states", "--global-batch-size 8 --use-distributed-optimizer", 4},
        ActivationCase{"sharded_gradients",
                       "--global-batch-size 8 --use-megatron-fsdp "
                       "--data-parallel-sharding-strategy optim_grads",
                       4},
        ActivationCase{"sharded_parameters", "--global-batch-size 8 --use-megatron-fsdp", 4}),
    [](const auto& info) { return info.param.name; });

TEST(StageMemory, AWeightPassHoldsInputsUntilItRuns) {
  const LayoutPlan plan = make_layout_plan(
      parse(kTiny +
                "--pipeline-model-parallel-size 4 --global-batch-size 16 --pipeline-schedule zb-h1",
            4),
      {500, 1024});
  EXPECT_GT(stage_memory(plan, 3).weight_gradients, 0);
}

// Processes on CPUs cannot reach each other's memory.
TEST(StageMemory, OnlyGpusHaveAMailbox) {
  const auto bytes = [](const char* more, bool on_gpu) {
    return stage_memory(make_layout_plan(parse(kTiny + "--tensor-model-parallel-size 2 " +
                                                   "--sequence-parallel " + more,
                                               2),
                                         {500, 1024}, on_gpu),
                        0)
        .allocated();
  };
  EXPECT_GT(bytes("", true), bytes("--no-peer-copies", true));
  EXPECT_EQ(bytes("", false), bytes("--no-peer-copies", false));
}

TEST(StageMemory, CodesOfQuantisedWeightsStay) {
  const std::string flags = kTiny + "--disable-bias-linear --bf16 ";
  const StageMemory plain = stage_memory(make_layout_plan(parse(flags, 1), {500, 1024}), 0),
                    quantised = stage_memory(
                        make_layout_plan(parse(flags + "--fp8-format hybrid", 1), {500, 1024}), 0);
  const LayoutPlan plan = make_layout_plan(parse(flags, 1), {500, 1024});
  const TransformerConfig& c = plan.model();
  const int64_t h = c.hidden_size, heads = c.num_attention_heads * c.kv_channels,
                groups = c.query_groups() * c.kv_channels;
  const int64_t layer = h * (heads + 2 * groups) + heads * h +
                        h * c.ffn_hidden_size * (is_gated(c.activation()) ? 3 : 2);
  EXPECT_EQ(quantised.weights - plain.weights, 2 * c.num_layers * layer);
  // Two of four experts on a rank, in place of the MLP.
  const std::string experts =
      flags + "--num-experts 4 --expert-model-parallel-size 2 --global-batch-size 8 ";
  const auto weights = [&](const char* more) {
    return stage_memory(make_layout_plan(parse(experts + more, 2), {500, 1024}), 0).weights;
  };
  const int64_t mlp = layer - h * (heads + 2 * groups) - heads * h;
  EXPECT_EQ(weights("--fp8-format hybrid") - weights(""), 2 * c.num_layers * (layer + mlp));
}

// -- traffic

double sent(const LayoutPlan& plan, int stage, const std::string& group) {
  for (const GroupTraffic& traffic : stage_traffic(plan, stage))
    if (traffic.group == group) return traffic.total();
  return 0;
}

TEST(Traffic, FollowsTheFormulas) {
  const std::string flags = kTiny + "--disable-bias-linear --untie-embeddings-and-output-weights ";
  const double product = 32 * 2 * 64 * 4;  // T h e
  {
    const LayoutPlan plan = make_layout_plan(
        parse(flags + "--pipeline-model-parallel-size 2 --global-batch-size 8", 2), {500, 1024});
    EXPECT_EQ(sent(plan, 0, "pp"), 4 * product);
    EXPECT_EQ(sent(plan, 1, "pp"), 4 * product);
    EXPECT_EQ(sent(plan, 0, "tp"), 0);
  }
  {
    const LayoutPlan plan = make_layout_plan(parse(flags, 2), {500, 1024});
    EXPECT_EQ(sent(plan, 0, "dp"),
              4.0 * static_cast<double>(plan.buffers(0, 0)[0].layout.num_elements));
  }
  {
    // 4 layers x (2 + 2) all-reduces, 1 of the embedding, 1 of the head's gradient, 3 numbers per
    // token; over two ranks an all-reduce sends as many bytes as the tensor has.
    const LayoutPlan plan =
        make_layout_plan(parse(flags + "--tensor-model-parallel-size 2", 2), {500, 1024});
    EXPECT_EQ(sent(plan, 0, "tp"), 18 * product + 3 * 4 * 64);
    const LayoutPlan sequence = make_layout_plan(
        parse(flags + "--tensor-model-parallel-size 2 --sequence-parallel", 2), {500, 1024});
    const double norms = 9 * 2 * 64 * 4 + 32 * 64 * 4;  // gains, shifts and learned positions, fp32
    EXPECT_EQ(sent(sequence, 0, "tp"), 4 * 5 * product + 2 * product + 3 * 4 * 64 + norms);
  }
  {
    const LayoutPlan plan = make_layout_plan(
        parse(flags + "--context-parallel-size 2 --cp-comm-type p2p", 2), {500, 1024});
    const double keys = 2 * 16 * 2 * 64 * 4;
    EXPECT_EQ(sent(plan, 0, "cp"), 4 * (keys + keys + 2 * keys));
  }
}

TEST(Traffic, RecomputedPartsCommunicateAgain) {
  const std::string flags = kTiny + "--disable-bias-linear --tensor-model-parallel-size 2 ";
  const auto all = [&](const std::string& more) {
    return sent(make_layout_plan(parse(flags + more, 2), {500, 1024}), 0, "tp");
  };
  // T h e; over two ranks an all-reduce sends as much
  const double product = 32 * 2 * 64 * 4, none = all("");
  EXPECT_EQ(all("--recompute-granularity selective --recompute-modules mlp") - none, 4 * product);
  EXPECT_EQ(all("--recompute-granularity selective --recompute-modules mlp_act layernorm") - none,
            0);
  const std::string full = "--recompute-granularity full --recompute-num-layers 2 ";
  EXPECT_EQ(all(full) - none, 4 * 2 * product);
  EXPECT_EQ(all(full + "--distribute-saved-activations") - all(full), 2 * product / 2);
}

TEST(Traffic, ShardedData) {
  const std::string flags = kTiny + "--bf16 --global-batch-size 24 ";  // 3 micro-batches on 4 ranks
  const auto elements = [](const LayoutPlan& plan) {
    return static_cast<double>(plan.buffers(0, 0)[0].layout.num_elements);
  };
  const LayoutPlan states =
      make_layout_plan(parse(flags + "--use-distributed-optimizer", 4), {500, 1024});
  EXPECT_DOUBLE_EQ(sent(states, 0, "dp"), 0.75 * (4 + 2) * elements(states));
  const LayoutPlan copies = make_layout_plan(
      parse(flags + "--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
                    "--grad-reduce-in-bf16",
            4),
      {500, 1024});
  EXPECT_DOUBLE_EQ(sent(copies, 0, "dp"), (0.5 * (2 + 2) + 2.0 / 2) * elements(copies));
  const std::string sharded = flags + "--use-megatron-fsdp --data-parallel-sharding-strategy ";
  const LayoutPlan gradients = make_layout_plan(parse(sharded + "optim_grads", 4), {500, 1024});
  // Those of a table, alone in its bucket, travel once: the tied one, and that of positions where a
  // bucket is a layer.
  constexpr double kWords = 1024 * 64, kPositions = 32 * 64;
  EXPECT_DOUBLE_EQ(sent(gradients, 0, "dp"),
                   0.75 * ((3 * 4 + 2) * elements(gradients) - 2 * 4 * kWords));
  const LayoutPlan values = make_layout_plan(parse(sharded + "optim_grads_params", 4), {500, 1024});
  EXPECT_DOUBLE_EQ(sent(values, 0, "dp"),
                   0.75 * (3 * (4 + 2 + 2) * elements(values) - 2 * 4 * (kWords + kPositions)));
}

TEST(Traffic, TiedTablesOnTwoStages) {
  const LayoutPlan plan = make_layout_plan(
      parse(kTiny + "--pipeline-model-parallel-size 4 --global-batch-size 16", 4), {500, 1024});
  EXPECT_EQ(sent(plan, 0, "embd"), 1024.0 * 64 * 4);
  EXPECT_EQ(sent(plan, 1, "embd"), 0);
  EXPECT_EQ(sent(plan, 3, "embd"), 1024.0 * 64 * 4);
}

// -- the time of a step

TEST(StepEstimate, FollowsTheFormulas) {
  const MachineSpeeds fast{1e12, 1e18, 1e18, 8};
  const auto plan_of = [](const std::string& flags, int64_t ranks) {
    return make_layout_plan(parse(kTiny + flags, ranks), {500, 1024});
  };
  // One rank: nothing but operations; 6 per weight and token, and causal attention.
  const StepEstimate one = estimate_step(plan_of("--global-batch-size 8", 1), fast);
  const double tokens = 8 * 32, layer = 12.0 * 64 * 64 + 32 * 64;
  const double operations = 6 * tokens * (4 * layer + 64.0 * 1024);
  EXPECT_NEAR(one.ideal, operations / 1e12, 1e-9 * one.ideal);
  EXPECT_EQ(one.tensor + one.context + one.pipeline + one.data + one.recompute, 0);
  EXPECT_NEAR(one.efficiency(), 1, 1e-9);
  // Recomputation of everything runs forward twice.
  const StepEstimate again = estimate_step(
      plan_of("--global-batch-size 8 --recompute-granularity full --recompute-method uniform", 1),
      fast);
  EXPECT_GT(again.recompute, 0.2 * again.ideal);
  // A pipeline waits as its replay says.
  const LayoutPlan stages = plan_of("--pipeline-model-parallel-size 4 --global-batch-size 16", 4);
  const StepEstimate piped = estimate_step(stages, fast);
  EXPECT_NEAR(piped.schedule / piped.total(), make_layout_report(stages).idle, 1e-6);
  // Whole gradients without overlap: all of their bytes at the speed between machines.
  const MachineSpeeds slow{1e18, 1e18, 1e6, 1};
  const LayoutPlan data = plan_of("--global-batch-size 8", 4);
  EXPECT_NEAR(estimate_step(data, slow).data, sent(data, 0, "dp") / 1e6,
              1e-6 * sent(data, 0, "dp") / 1e6);
  // Tensor ranks of one machine send inside of it.
  const LayoutPlan tensor = plan_of("--tensor-model-parallel-size 4 --global-batch-size 8", 4);
  const MachineSpeeds inside{1e18, 1e6, 1e18, 4};
  EXPECT_NEAR(estimate_step(tensor, inside).tensor, sent(tensor, 0, "tp") / 1e6,
              0.01 * sent(tensor, 0, "tp") / 1e6);
}

// -- report

TEST(LayoutReport, TextJsonAndPicture) {
  const LayoutPlan plan =
      make_layout_plan(parse(kTiny + "--bf16 --tensor-model-parallel-size 2 "
                                     "--pipeline-model-parallel-size 2 --global-batch-size 16",
                             8),
                       {500, 1024});
  const LayoutReport report = make_layout_report(plan);
  const std::string text = layout_text(plan, report);
  for (const char* part : {"8 ranks = tp 2 x cp 1 x pp 2 x dp 2", "the stages hold 4 of 4 layers",
                           "E+1-2", "3-4+L", "optimizer states", "allocated at the peak",
                           "CUDA context", "micro-batches in flight", "pp", "embd"})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(layout_json(plan, report), HasSubstr("\"fullest_stage\": "));
  EXPECT_THAT(schedule_text(plan, 100), HasSubstr("stage 1"));
  EXPECT_THAT(schedule_svg(plan), HasSubstr("<svg"));
}

TEST(LayoutReport, ListsTheGroupsOfExperts) {
  LayoutPlan plan = make_layout_plan(
      parse(kTiny + "--tensor-model-parallel-size 2 --global-batch-size 16", 8), {500, 1024});
  const LayoutReport report = make_layout_report(plan);
  const auto listed = [&](const std::string& name) {
    return layout_json(plan, report).find(cat("\"name\": \"", name, "\"")) != std::string::npos;
  };
  for (const char* name : {"tp", "dp", "dp-cp", "tp-pp"}) EXPECT_TRUE(listed(name)) << name;
  for (const char* name : {"ep", "etp", "edp", "etp-ep-pp"}) EXPECT_FALSE(listed(name)) << name;
  MeshSizes sizes;
  sizes.tensor = sizes.expert_tensor = sizes.expert = 2;
  sizes.data = 4;
  plan.mesh = Mesh(sizes);
  for (const char* name : {"tp", "dp", "dp-cp", "tp-pp", "ep", "edp", "etp-ep"})
    EXPECT_TRUE(listed(name)) << name;
  EXPECT_FALSE(listed("etp")) << "the ranks of tp";
  EXPECT_FALSE(listed("etp-ep-pp")) << "those of etp-ep";
  EXPECT_THAT(layout_text(plan, report), testing::ContainsRegex("edp +4 +2 +0 4"));
}

TEST(LayoutReport, AKnownDeviceGivesAVerdictAndTheTimeOfAStep) {
  const std::string llama =
      kRun +
      "--micro-batch-size 1 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
      "--group-query-attention --num-query-groups 8 "
      "--ffn-hidden-size 14336 --swiglu --seq-length 4096 --bf16 --global-batch-size 8 ";
  const auto report_of = [&](const std::string& flags, int64_t ranks, DeviceChoice choice) {
    const Arguments arguments = parse(llama + flags, ranks);
    LayoutQuestions questions;
    questions.device = device_model(choice);
    questions.speeds = speeds_of(*questions.device, arguments);
    return make_layout_report(make_layout_plan(arguments, {500, 128256}), questions);
  };
  // 16 bytes for each of 8 billion parameters are more than either GPU has; over eight ranks they
  // fit.
  const LayoutReport one = report_of("--attention-dropout 0", 1, DeviceChoice::kH200);
  EXPECT_FALSE(one.verdict->fits());
  EXPECT_GT(one.verdict->needed, 16 * int64_t{7'500'000'000});
  EXPECT_THAT(verdict_text(*one.verdict), HasSubstr("DOES NOT FIT an H200: stage 0 needs "));
  const LayoutReport eight =
      report_of("--attention-dropout 0 --use-distributed-optimizer", 8, DeviceChoice::kH100);
  EXPECT_TRUE(eight.verdict->fits());
  EXPECT_EQ(eight.verdict->needed, eight.stages[0].memory.allocated() + eight.outside.context +
                                       eight.outside.communicators);
  EXPECT_THAT(verdict_text(*eight.verdict), HasSubstr("fits an H100: stage 0 needs "));
  // A step at the attained rate; faster GPUs take less.
  EXPECT_NEAR(one.step->total(), one.step->ideal, 1e-9);
  EXPECT_LT(report_of("--attention-dropout 0", 1, DeviceChoice::kB200).step->total(),
            one.step->total() / 2);
}

TEST(LayoutReport, AttentionDropoutIsPriced) {
  const std::string model = kRun +
                            "--micro-batch-size 1 --num-layers 8 --hidden-size 4096 "
                            "--num-attention-heads 32 --seq-length 4096 --bf16 "
                            "--hidden-dropout 0 --global-batch-size 1 ";
  const LayoutPlan with = make_layout_plan(parse(model, 1), {500, 32000});
  const LayoutPlan without =
      make_layout_plan(parse(model + "--attention-dropout 0", 1), {500, 32000});
  const LayoutReport report = make_layout_report(with);
  const int64_t more = report.stages[0].memory.allocated() -
                       make_layout_report(without).stages[0].memory.allocated();
  EXPECT_GT(more, int64_t{1} << 29);  // scores of 32 heads of 4096 x 4096, in parts
  EXPECT_EQ(attention_dropout_bytes(with, report), more);
  EXPECT_THAT(attention_dropout_text(with, report),
              HasSubstr("--attention-dropout 0.1 takes unfused attention, which costs "));
  EXPECT_EQ(attention_dropout_bytes(without, make_layout_report(without)), 0);
  EXPECT_EQ(attention_dropout_text(without, make_layout_report(without)), "");
}

TEST(StartNotes, NameWhatCostsMuchMoreThanItSeems) {
  const std::string model = kRun +
                            "--micro-batch-size 1 --num-layers 2 --hidden-size 4096 "
                            "--num-attention-heads 32 --seq-length 4096 ";
  const auto notes = [&](const std::string& flags, bool on_gpu) {
    return start_notes(parse(model + flags, 1), {500, 32000}, on_gpu);
  };
  using testing::ElementsAre;
  EXPECT_THAT(notes("", false), ElementsAre());
  EXPECT_THAT(notes("--bf16", false),
              ElementsAre(HasSubstr("--bf16 on a CPU is about 11 times slower than fp32")));
  EXPECT_THAT(notes("--bf16 --fp8-format hybrid", false),
              ElementsAre(HasSubstr("--fp8-format on a CPU is about 12 times")));
  EXPECT_THAT(notes("--bf16", true),
              ElementsAre(HasSubstr("--attention-dropout 0.1 takes unfused attention")));
  EXPECT_THAT(notes("--bf16 --attention-dropout 0", true), ElementsAre());
}

TEST(LayoutReport, TenThousandRanksTakeNoTime) {
  const auto start = std::chrono::steady_clock::now();
  const std::string big = kRun +
                          "--bf16 --seq-length 2048 --micro-batch-size 1 --sequence-parallel "
                          "--tensor-model-parallel-size 8 ";
  const Arguments gpt3 = parse(
      "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --pipeline-model-parallel-size "
      "16 "
      "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 2496" +
          big,
      9984);
  LayoutQuestions questions;
  questions.speeds = {600e12, 400e9, 50e9, 8};
  questions.checkpoint_bandwidth = 1e9;
  const LayoutReport small = make_layout_report(make_layout_plan(gpt3, {50257, 51200}), questions);
  // Everything once: 174.6 B parameters (learned positions for 2048 tokens among them), 2 + 12
  // bytes each.
  EXPECT_EQ(small.checkpoint.total, 14 * (small.parameters - (51200 - 50257) * int64_t{12288}));
  EXPECT_EQ(*small.checkpoint_seconds, static_cast<double>(small.checkpoint.most()) / 1e9);
  EXPECT_GT(small.step->efficiency(), 0.3);
  EXPECT_LT(small.step->efficiency(), 1.0);
  const Arguments trillion = parse(
      "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 "
      "--pipeline-model-parallel-size 64 "
      "--global-batch-size 3072" +
          big,
      12288);
  const LayoutPlan plan = make_layout_plan(trillion, {50257, 51200});
  const LayoutReport large = make_layout_report(plan, questions);
  EXPECT_EQ(large.checkpoint.total, 14 * (large.parameters - (51200 - 50257) * int64_t{25600}));
  EXPECT_THAT(layout_text(plan, large), HasSubstr("efficiency"));
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 10.0);
}

}  // namespace
}  // namespace megatron
