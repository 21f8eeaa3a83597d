#include "megatron/training/arguments/arguments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/training/arguments/configuration_changes.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using testing::Not;

Arguments parse(const std::string& flags) { return parse_line("pretrain " + flags); }

std::string usage_error(const std::string& flags) {
  try {
    parse(flags);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

const std::string kGood =
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 "
    "--tokenizer-type ByteLevelTokenizer --mock-data ";

TEST(Arguments, WhatTheVocabularyOverTheStagesNeeds) {
  const std::string flags = kGood + "--pipeline-vocab-parallel ";
  EXPECT_THAT(
      usage_error(flags),
      HasSubstr("--pipeline-vocab-parallel has no effect with --pipeline-model-parallel-size 1"));
  const std::string stages = flags + "--pipeline-model-parallel-size 2 --global-batch-size 8 ";
  EXPECT_THAT(
      usage_error(stages),
      HasSubstr("--pipeline-vocab-parallel divides an output layer of its own over the stages, but "
                "the embedding's table is used\nhint: --untie-embeddings-and-output-weights"));
  const std::string untied = stages + "--untie-embeddings-and-output-weights ";
  EXPECT_THAT(usage_error(untied), Not(HasSubstr("vocab")));  // a rank is missing, nothing else
  EXPECT_THAT(
      usage_error(untied + "--padded-vocab-size 301"),
      HasSubstr(
          "--padded-vocab-size 301 is not divisible by --tensor-model-parallel-size 1 x "
          "--pipeline-model-parallel-size 2, which --pipeline-vocab-parallel divides it over"));
  EXPECT_THAT(
      usage_error(untied + "--account-for-loss-in-pipeline-split"),
      HasSubstr("--account-for-loss-in-pipeline-split counts an output layer on the last stage"));
}

TEST(Arguments, WhatTokensAheadNeed) {
  const std::string flags = kGood + "--mtp-num-layers 2 ";
  EXPECT_EQ(parse(flags).transformer.mtp_num_layers, 2);
  EXPECT_THAT(usage_error(flags + "--mtp-detach-heads"),
              HasSubstr("--mtp-detach-heads is refused: detached heads need a gradient norm"));
  const std::string stages = flags + "--pipeline-model-parallel-size 2 --global-batch-size 8 ";
  EXPECT_THAT(usage_error(stages + "--pipeline-vocab-parallel"),
              HasSubstr("--mtp-num-layers with --pipeline-vocab-parallel is not built"));
  EXPECT_THAT(usage_error(stages + "--pipeline-schedule zb-v"),
              HasSubstr("--mtp-num-layers with learned positions is not built"));
  EXPECT_THAT(usage_error(stages + "--pipeline-model-parallel-layout Et|tmL"),
              HasSubstr("has 1 m, --mtp-num-layers is 2\nhint: as many m, directly before L"));
  EXPECT_THAT(usage_error(stages + "--pipeline-model-parallel-layout Etmm|tL"),
              HasSubstr("multi-token prediction on another segment than the loss is not built"));
  EXPECT_THAT(usage_error(stages + "--pipeline-model-parallel-layout Et|tm*2L"),
              Not(HasSubstr("mtp")));  // a rank is missing, nothing else
  EXPECT_THAT(usage_error(flags + "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16"),
              HasSubstr("--mtp-num-layers with --hybrid-context-parallel is not built"));
}

TEST(Arguments, WhatDocumentsOfTheirOwnWidthNeed) {
  EXPECT_THAT(usage_error(kGood + "--max-seqlen-per-dp-cp-rank 8"),
              HasSubstr("no effect without --hybrid-context-parallel"));
  EXPECT_THAT(usage_error(kGood + "--hybrid-context-parallel"),
              HasSubstr("without --max-seqlen-per-dp-cp-rank"));
  const std::string flags = kGood + "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 16 ";
  const std::string good = flags + "--reset-attention-mask --attention-dropout 0 ";
  EXPECT_TRUE(parse(good).parallel.hybrid_context_parallel);
  EXPECT_THAT(usage_error(flags), HasSubstr("computes documents apart"));
  EXPECT_THAT(usage_error(flags), HasSubstr("--attention-dropout above 0 is not built"));
  EXPECT_THAT(usage_error(good + "--no-calculate-per-token-loss"),
              HasSubstr("--no-calculate-per-token-loss is not built"));
  EXPECT_THAT(usage_error(good + "--overlap-grad-reduce"),
              HasSubstr("--overlap-grad-reduce is not built"));
  EXPECT_THAT(usage_error(good + "--use-megatron-fsdp"),
              HasSubstr("sharded gradients is not built"));
  EXPECT_THAT(usage_error(good + "--cp-comm-type a2a"), HasSubstr("a2a or a2a+p2p is not built"));
  EXPECT_THAT(usage_error(good + "--window-size 4 0"),
              HasSubstr("--window-size cannot be used with the ring"));
  EXPECT_THAT(usage_error(good + "--pipeline-model-parallel-size 2"),
              HasSubstr("ranks run different numbers of passes"));
  EXPECT_THAT(
      usage_error(kGood + "--reset-attention-mask --attention-dropout 0 --hybrid-context-parallel "
                          "--max-seqlen-per-dp-cp-rank 15"),
      HasSubstr("a document may have --seq-length 16 tokens, of which 1 of the 1 ranks of data and "
                "context hold 15"));
}

TEST(Arguments, DefaultsFollowFromOthers) {
  const Arguments a = parse(kGood);
  EXPECT_EQ(a.training.global_batch_size, 2);
  EXPECT_EQ(a.transformer.ffn_hidden_size, 128);
  EXPECT_EQ(a.train_iters(), 10);
  EXPECT_EQ(a.eval_global_batch_size(), 2);
  EXPECT_EQ(a.eval_micro_batch_size(), 2);
  EXPECT_TRUE(a.training.calculate_per_token_loss);
  EXPECT_TRUE(parse(kGood + "--calculate-per-token-loss").training.calculate_per_token_loss);
  EXPECT_FALSE(parse(kGood + "--no-calculate-per-token-loss").training.calculate_per_token_loss);
  EXPECT_EQ(parse(kGood + "--save /tmp/x --start-mode resume-or-fresh").training.load, "/tmp/x");
  EXPECT_TRUE(parse(kGood + "--exit-signal-handler").training.exit_signal_handler);
  EXPECT_EQ(parse(kGood + "--save-interval 5").training.save_interval, 5)
      << "a value that does not trigger is no error";
  EXPECT_FALSE(parse(kGood + "--no-position-embedding --position-embedding-type rope")
                   .transformer.add_position_embedding);
  EXPECT_FALSE(parse(kGood + "--no-exit-signal-handler").training.exit_signal_handler);
}

TEST(Arguments, SamplesInPlaceOfIterations) {
  const std::string flags = kGood.substr(0, kGood.find("--train-iters")) +
                            "--train-samples 101 --lr 1e-3 " +
                            "--tokenizer-type ByteLevelTokenizer --mock-data --global-batch-size 4";
  EXPECT_EQ(parse(flags).train_iters(), 25);
}

TEST(Arguments, AllViolationsComeAtOnce) {
  const std::string error = usage_error(
      "--num-layers 2 --hidden-size 32 --num-attention-heads 3 --moe-paged-stash "
      "--micro-batch-size "
      "2 --global-batch-size 3 "
      "--seq-length 16 --lr-warmup-iterz 5 --eval-micro-batch-size 2 --save-interval 5");
  for (const char* text : {"--moe-paged-stash is refused",
                           "unknown flag --lr-warmup-iterz; did you mean --lr-warmup-iters?",
                           "--hidden-size 32 is not divisible by --num-attention-heads 3",
                           "--global-batch-size 3 is not divisible by --micro-batch-size 2",
                           "neither --train-iters nor --train-samples", "--lr is not given",
                           "no data is given", "--tokenizer-type is not given",
                           "--global-batch-size 3, also of evaluations, is not divisible by "
                           "--eval-micro-batch-size 2"})
    EXPECT_THAT(error, HasSubstr(text));
}

TEST(Arguments, OnlyTheCauseIsReported) {
  EXPECT_EQ(usage_error(kGood + "--global-batch-size 3"),
            "--global-batch-size 3 is not divisible by --micro-batch-size 2 times the "
            "data-parallel size 1\n"
            "hint: give a multiple of 2, or --decrease-batch-size-if-needed");
  EXPECT_THAT(usage_error(kGood + "--num-layers -2"),
              HasSubstr("--num-layers is -2\nhint: 1 or more"));
  EXPECT_THAT(
      usage_error(kGood + "--lr-warmup-iters 20 --global-batch-size 4"),
      HasSubstr(
          "--lr-warmup-iters 20 (80 samples) does not end before --train-iters 10 (40 samples)"));
}

TEST(Arguments, HelpIsShortUnlessMoreIsAskedFor) {
  Arguments arguments;
  const auto configs = arguments.configs();
  const std::string brief = run_help("usage", configs, "");
  EXPECT_LT(std::count(brief.begin(), brief.end(), '\n'), 100);
  for (const char* flag :
       {"--num-layers N", "--lr X", "--save TEXT", "--tensor-model-parallel-size N"})
    EXPECT_THAT(brief, HasSubstr(flag));
  EXPECT_THAT(run_help("usage", configs, "lora"), HasSubstr("--lora-alpha"));
  const std::string all = run_help("usage", configs, "all");
  for (const FieldInfo& field : describe_fields(configs))
    EXPECT_THAT(all, HasSubstr(field.flags[0]));
}

struct BadFlags {
  const char* flags;
  const char* message;
};

class BadArguments : public testing::TestWithParam<BadFlags> {};

TEST_P(BadArguments, AreRefused) {
  EXPECT_THAT(usage_error(kGood + GetParam().flags), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Rules, BadArguments,
    testing::Values(
        BadFlags{"--train-samples 5", "--train-iters and --train-samples are both given"},
        BadFlags{"--step-batch-size-schedule 0:2 --global-batch-size 2",
                 "--step-batch-size-schedule and --global-batch-size are both given"},
        BadFlags{"--step-batch-size-schedule 0:3",
                 "--step-batch-size-schedule: batch size 3 is not divisible"},
        BadFlags{"--step-batch-size-schedule 0:2 --decrease-batch-size-if-needed",
                 "and --decrease-batch-size-if-needed are both given"},
        BadFlags{"--fp32-residual-connection", "--fp32-residual-connection has no effect in fp32"},
        BadFlags{"--fp16 --bf16", "--bf16"},
        BadFlags{"--expert-model-parallel-size 2",
                 "--expert-model-parallel-size 2 needs --num-experts"},
        BadFlags{"--async-save", "--async-save is given without --save"},
        BadFlags{"--keep-last-checkpoints 2", "is given without --save"},
        BadFlags{"--save /tmp/x --load /tmp/x --finetune",
                 "--finetune would write into the folder it starts from, /tmp/x"},
        BadFlags{"--finetune", "is given without --load"},
        BadFlags{"--ckpt-step 5", "is given without --load"},
        BadFlags{"--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
                 "are both given"},
        BadFlags{"--save /tmp/x --save-interval 4 --save-retain-interval 6",
                 "--save-retain-interval 6 is no multiple of --save-interval 4"},
        BadFlags{"--log-interval 4 --log-memory-interval 6",
                 "--log-memory-interval 6 is no multiple of --log-interval 4"},
        BadFlags{"--log-interval 0 --log-memory-interval 6", "--log-interval"},
        BadFlags{"--save /tmp/x --save-interval 0 --save-retain-interval 6", "--save-interval"},
        BadFlags{"--log-interval 0", "--log-interval is 0"},
        BadFlags{"--eval-iters -1", "--eval-iters is -1"},
        BadFlags{"--timing-log-level 3", "--timing-log-level is 3"},
        BadFlags{"--profile --profile-step-start 5 --profile-step-end 5",
                 "--profile-step-end 5 is not after --profile-step-start 5"},
        BadFlags{"--profile --device cpu", "--profile has no folder to write its trace to"},
        BadFlags{"--start-mode later", "--start-mode"}, BadFlags{"--min-lr 1", "--min-lr"},
        BadFlags{"--cpu-offloading-num-layers 1 --pipeline-model-parallel-size 2",
                 "--cpu-offloading-num-layers counts the layers of one stage, but "
                 "--pipeline-model-parallel-size is above 1"},
        BadFlags{"--no-peer-copies",
                 "--no-peer-copies has no effect here: no sharded optimizer and no sequence "
                 "parallelism"},
        BadFlags{"--recompute-granularity full --distribute-saved-activations",
                 "--distribute-saved-activations has no effect at one tensor-parallel rank"},
        BadFlags{"--recompute-granularity full --distribute-saved-activations "
                 "--tensor-model-parallel-size 2 --sequence-parallel",
                 "--distribute-saved-activations has no effect with --sequence-parallel, which "
                 "divides saved inputs already"},
        BadFlags{"--tensor-model-parallel-size 2 --normalization RMSNorm --group-query-attention "
                 "--num-query-groups 1 --qk-layernorm "
                 "--qk-layernorm-over-heads",
                 "--qk-layernorm-over-heads with fewer --num-query-groups (1) than "
                 "--tensor-model-parallel-size (2) is not built"},
        BadFlags{"--fp8-format hybrid", "--fp8-format needs --bf16"},
        BadFlags{"--fp8-format e4m3 --bf16 --fp8-recipe blockwise",
                 "--hidden-size is 32, which --fp8-format needs to be a multiple of 128"},
        BadFlags{"--fp8-format e4m3 --bf16 --fp8-recipe blockwise",
                 "--micro-batch-size x --seq-length is 32, which --fp8-format needs to be a "
                 "multiple of 128"},
        BadFlags{"--fp8-format hybrid --bf16 --ffn-hidden-size 72",
                 "--ffn-hidden-size is 72, which --fp8-format needs to be a multiple of 16"},
        BadFlags{"--fp8-format hybrid --bf16 --hybrid-layer-pattern M- --mamba-num-heads 6 "
                 "--mamba-num-groups 2",
                 "the rows of in_proj of a Mamba-2 layer is 1286, which --fp8-format needs to be a "
                 "multiple of 16"},
        BadFlags{"--fp8-format hybrid --bf16 --hybrid-layer-pattern G- --linear-num-value-heads 36 "
                 "--linear-num-key-heads 4",
                 "the rows of in_proj of a gated delta net is 10312, which --fp8-format needs to "
                 "be a multiple of 16"},
        BadFlags{"--fp8-format fp8", "--fp8-format"},
        BadFlags{"--fp8-recipe tensorwise", "--fp8-recipe is given without --fp8-format"},
        BadFlags{"--fp8-format hybrid --bf16 --fp8-recipe mxfp8",
                 "--fp8-recipe mxfp8 needs the scaled products of Blackwell GPUs"},
        BadFlags{"--fp8-format hybrid --bf16 --fp8-recipe custom",
                 "--fp8-recipe custom loads quantisers from Python"},
        BadFlags{"--fp8-format hybrid --bf16 --fp8-recipe tensorwise --fp8-margin 1",
                 "--fp8-margin has an effect only with"},
        BadFlags{"--fp8-amax-history-len 16", "--fp8-amax-history-len has an effect only with"},
        BadFlags{"--fp8-format hybrid --bf16 --fp8-amax-history-len 0",
                 "--fp8-amax-history-len 0 is outside 1 to 65536 steps"},
        BadFlags{"--no-fp8-wgrad", "--no-fp8-wgrad has an effect only with --fp8-format"},
        BadFlags{"--first-last-layers-bf16",
                 "--first-last-layers-bf16 has an effect only with --fp8-format"},
        BadFlags{"--fp8-format hybrid --bf16 --first-last-layers-bf16",
                 "leave none of --num-layers 2 to quantise"},
        BadFlags{"--fp8-format hybrid --bf16 --num-layers-at-start-in-bf16 0",
                 "have an effect only with --first-last-layers-bf16"},
        BadFlags{"--fp8-format hybrid --bf16 --fp4-format e2m1",
                 "--fp8-format and --fp4-format are both given"},
        BadFlags{"--fp8-format hybrid --bf16 --fp8-param-gather",
                 "gathering weights in FP8 or FP4 is not built yet"},
        BadFlags{"--fp8-output-proj", "--fp8-output-proj is refused"},
        BadFlags{"--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"}));

TEST(Arguments, AFolderOfHuggingFaceIsTheDefaultOfTheModel) {
  const std::string folder = MEGATRON_SOURCE_DIR "/tests/golden/hf/mistral";
  const std::string run = " --micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data";
  for (const char* flag : {"--load ", "--pretrained-checkpoint "}) {
    const Arguments arguments = parse(flag + folder + run);
    EXPECT_EQ(arguments.transformer.num_layers, 2);
    EXPECT_EQ(arguments.transformer.window_size, (std::vector<int64_t>{8, 0}));
    EXPECT_EQ(arguments.transformer.seq_length, 128);
    EXPECT_EQ(arguments.tokenizer.tokenizer_type, "NullTokenizer");
    EXPECT_EQ(arguments.tokenizer.vocab_size, 40);
  }
  const Arguments other = parse("--load " + folder + run + " --seq-length 16 --hidden-dropout 0.2");
  EXPECT_EQ(other.transformer.seq_length, 16);
  EXPECT_EQ(other.transformer.hidden_dropout, 0.2);
}

TEST(Arguments, RanksThatShareAGroupDivideItsRows) {
  EXPECT_THAT(usage_error("--num-layers 2 --hidden-size 48 --num-attention-heads 6 --seq-length 16 "
                          "--micro-batch-size 2 --train-iters 10 --lr 1e-3 "
                          "--tokenizer-type ByteLevelTokenizer --mock-data "
                          "--tensor-model-parallel-size 3 --group-query-attention "
                          "--num-query-groups 1"),
              HasSubstr("the 64 rows of queries, keys and values (--num-attention-heads 6, "
                        "--num-query-groups 1, --kv-channels 8) are not "
                        "divisible by --tensor-model-parallel-size 3"));
}

TEST(Arguments, ResolvedConfigurationFeedsBack) {
  const Arguments first = parse(
      kGood +
      "--swiglu --disable-bias-linear --lr-decay-style cosine --no-log-loss-scale-to-tensorboard "
      "--start-mode fresh --hidden-dropout 0 --eval-interval 5");
  const std::string path = testing::TempDir() + "arguments_test.yaml";
  write_file_atomically(path, resolved_yaml(first));
  const Arguments second = parse("--config " + path);
  EXPECT_EQ(resolved_yaml(second), resolved_yaml(first));
  EXPECT_FALSE(second.training.log_loss_scale_to_tensorboard);
  EXPECT_EQ(parse("--config " + path + " --lr 5").optimizer.lr, 5);
}

TEST(Arguments, HelpValidatesNothing) { EXPECT_TRUE(parse("--help").help); }

TEST(Arguments, AlreadySoFlagsAreListed) {
  const Arguments a = parse(kGood + "--transformer-impl local");
  ASSERT_EQ(a.already_so.size(), 1u);
  EXPECT_EQ(a.already_so[0].first, "--transformer-impl local");
  EXPECT_EQ(parse(kGood + "--sequence-parallel").already_so[0].first, "--sequence-parallel");
}

TEST(Arguments, ServedBitsCannotBeTrainedEverywhere) {
  const std::string flags = kGood + "--batch-invariant-mode ",
                    plain = "--attention-dropout 0 --hidden-dropout 0 ";
  EXPECT_TRUE(parse(flags + plain).transformer.batch_invariant_mode);
  EXPECT_TRUE(parse(flags + plain + "--hybrid-layer-pattern M* --mamba-num-groups 1 ")
                  .transformer.batch_invariant_mode);
  EXPECT_EQ(parse(flags + plain + "--batch-invariant-backend te_native").already_so.size(), 1u);
  EXPECT_THAT(usage_error(flags),
              HasSubstr("--batch-invariant-mode cannot be used with dropout, which no server has"));
  EXPECT_TRUE(parse(flags + plain + "--bf16 --device cuda").transformer.batch_invariant_mode);
  for (const auto& [more, problem] : std::vector<std::pair<std::string, std::string>>{
           {"--bf16 --device cuda --fp8-format hybrid --fp8-recipe tensorwise",
            "cannot be used with one FP8 scale for a whole tensor"},
           {"--fp8-format hybrid --fp8-recipe blockwise",
            "with FP8 products is built for GPUs alone"},
           {"--bf16 --device cuda --hybrid-layer-pattern M* --mamba-num-groups 1",
            "with layers that have states is not built for GPUs"},
           {"--device cuda", "computes in bf16 or fp16 on GPUs"},
           {"--bf16 --device cpu", "computes in fp32 on a CPU"}})
    EXPECT_THAT(usage_error(flags + plain + more), HasSubstr("--batch-invariant-mode " + problem));
}

TEST(Arguments, AFlagIsRefusedWhereItsReasonDoesNotHold) {
  EXPECT_EQ(parse(kGood + "--deterministic-mode").already_so.size(), 1u);
  EXPECT_EQ(
      usage_error(kGood + "--deterministic-mode --fast"),
      "--deterministic-mode is refused: --fast lets the backward of attention sum in any order");
  EXPECT_EQ(usage_error(kGood + "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16"),
            "--accumulate-allreduce-grads-in-fp32 is refused: --grad-reduce-in-bf16 rounds "
            "gradients for the sums over the ranks");
  EXPECT_EQ(
      usage_error(kGood + "--no-pin-cpu-params --optimizer-cpu-offload"),
      "--no-pin-cpu-params is refused: the copies of --optimizer-cpu-offload need pinned memory");
  EXPECT_EQ(usage_error(kGood + "--use-flash-attn --attention-backend unfused"),
            "--use-flash-attn is refused: --attention-backend names other kernels");
  EXPECT_EQ(usage_error(kGood + "--exit-on-missing-checkpoint --start fresh"),
            "--exit-on-missing-checkpoint is refused: --start-mode fresh, resume-or-fresh and "
            "--pretrained-checkpoint say what to "
            "start from instead");
}

TEST(Arguments, ValuesThatOnlyMegatronHasAreRefusedWithTheReason) {
  EXPECT_EQ(usage_error(kGood + "--dataloader-type external"),
            "--dataloader-type external is refused: loaders in Python do not run here\nhint: legal "
            "values: single, cyclic");
  EXPECT_EQ(usage_error(kGood + "--main-grads-dtype bf16"),
            "--main-grads-dtype bf16 is refused: gradients are accumulated in fp32\nhint: legal "
            "values: fp32");
  EXPECT_THAT(usage_error(kGood + "--exp-avg-dtype fp8"),
              HasSubstr("is refused: fp16 and fp8 do not span the magnitudes"));
  EXPECT_THAT(usage_error(kGood + "--exp-avg-dtype double"), HasSubstr("is not one of its values"));
}

TEST(Arguments, WithoutPositionEmbeddingsNoneAreLearned) {
  EXPECT_EQ(parse(kGood).transformer.position_embedding_type, PositionEmbedding::kLearnedAbsolute);
  EXPECT_EQ(parse(kGood + "--no-position-embedding").transformer.position_embedding_type,
            PositionEmbedding::kNone);
  EXPECT_EQ(parse(kGood + "--no-position-embedding --use-rotary-position-embeddings")
                .transformer.position_embedding_type,
            PositionEmbedding::kRope);
}

TEST(Arguments, WhatChangedSinceACheckpointIsListed) {
  const std::filesystem::path stored =
      std::filesystem::path(testing::TempDir()) / "stored_config.yaml";
  write_file_atomically(
      stored, resolved_yaml(parse(kGood + "--hidden-dropout 0.1 --save here --load there")));
  const auto changes = [&](const std::string& flags) {
    return configuration_changes(parse(kGood + flags), stored);
  };
  using testing::ElementsAre;
  EXPECT_THAT(changes("--hidden-dropout 0.1 --save here --load here --start resume"),
              ElementsAre());
  EXPECT_THAT(
      changes("--hidden-dropout 0.3 --save here --no-gemm-tuning --lr-decay-iters 7 --freeze "
              "decoder embedding"),
      ElementsAre("--hidden-dropout 0.3, was 0.1", "--lr-decay-iters 7, was none",
                  "--freeze decoder embedding, was not given", "gemm_tuning false, was true"));
  write_file_atomically(stored, "hidden_dropout: 0.1\nsome_flag_of_tomorrow: 3\n");
  EXPECT_THAT(changes("--hidden-dropout 0.3"), testing::Contains("--hidden-dropout 0.3, was 0.1"));
  EXPECT_THAT(configuration_changes(parse(kGood), "/nonexistent/config.yaml"), ElementsAre());
}

TEST(Arguments, CheckpointArgumentsNeedACheckpoint) {
  try {
    parse(kGood + "--use-checkpoint-args --load /nonexistent/run");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/nonexistent/run"));
  }
}

}  // namespace
}  // namespace megatron
