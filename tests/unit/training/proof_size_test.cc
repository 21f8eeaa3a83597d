// What `prove` keeps of a model's structure when it makes it small.
#include "megatron/transformer/config/proof/proof_size.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/proving/prove.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kLlama =
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 ";
// Every sixth layer attends fully.
constexpr const char* kGemma =
    "--hidden-size 2560 --num-attention-heads 8 --group-query-attention --num-query-groups 4 "
    "--kv-channels 256 --seq-length 8192 --position-embedding-type rope --window-size 1023 0 "
    "--window-attn-skip-freq 6 --attention-dropout 0 --hidden-dropout 0 ";

Shrunk shrunk(const std::string& flags, int64_t world_size, int64_t max_axis = 4) {
  const Arguments arguments = parse_line(
      "prove --mock-data --tokenizer-type NullTokenizer --vocab-size 128000 --lr 1e-3 "
      "--train-iters 10 --micro-batch-size 1 --global-batch-size 96 " +
          flags,
      world_size);
  return shrink(arguments, max_axis);
}

// -- heads

struct HeadsOfRank {
  int64_t heads, groups;
  bool operator==(const HeadsOfRank&) const = default;
};

HeadsOfRank of_tensor_rank(const Shrunk& small) {
  const TransformerConfig& t = small.arguments.transformer;
  const int64_t tp = small.arguments.parallel.tensor_model_parallel_size;
  return {t.num_attention_heads / tp, t.query_groups() / tp};
}

TEST(ShrinkHeads, ValuesOfLatentsStayNarrowerOrWider) {
  for (const int64_t values : {128, 192, 256}) {
    const Shrunk small =
        shrunk(cat("--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
                   "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-layernorm "
                   "--position-embedding-type rope --rotary-scaling-factor 40 "
                   "--tensor-model-parallel-size 2 --v-head-dim ",
                   values),
               2);
    const TransformerConfig& t = small.arguments.transformer;
    EXPECT_LT(*t.q_lora_rank + t.kv_lora_rank, 64);
    EXPECT_EQ(t.kv_channels, t.query_head_size());
    EXPECT_EQ(t.v_head_dim < t.query_head_size(), values < 192);
    EXPECT_EQ(t.v_head_dim > t.query_head_size(), values > 192);
    EXPECT_GE(t.num_attention_heads, 4);
    EXPECT_THAT(small.lost, IsEmpty());
  }
}

// Where the two differ, k0 k0 k1 k1 and k0 k1 k0 k1: several groups, each copied.
TEST(ShrinkHeads, FewerGroupsThanContextRanksStayFewerAndSeveral) {
  const std::string a2a = std::string(kLlama) + "--cp-comm-type a2a ";
  const auto check = [&](const std::string& ranks, int64_t world_size, int64_t max_axis) {
    SCOPED_TRACE(ranks);
    const Shrunk small = shrunk(a2a + ranks, world_size, max_axis);
    const HeadsOfRank own = of_tensor_rank(small);
    const int64_t cp = small.arguments.parallel.context_parallel_size;
    EXPECT_GE(own.groups, 2);
    EXPECT_GT(cp, own.groups);
    EXPECT_EQ(cp % own.groups, 0);
    EXPECT_THAT(small.lost, IsEmpty());
  };
  check("--tensor-model-parallel-size 2 --context-parallel-size 8", 16, 4);
  check("--tensor-model-parallel-size 2 --context-parallel-size 8", 16, 8);
  check("--tensor-model-parallel-size 4 --context-parallel-size 4", 16, 4);
  check("--context-parallel-size 16", 16, 4);
}

TEST(ShrinkHeads, TheInnerLevelOfAHierarchyExchangesThem) {
  const Shrunk small = shrunk(std::string(kLlama) +
                                  "--tensor-model-parallel-size 4 --context-parallel-size 16 "
                                  "--cp-comm-type a2a+p2p "
                                  "--hierarchical-context-parallel-sizes 8 2",
                              64, 8);
  EXPECT_EQ(small.arguments.parallel.hierarchical_context_parallel_sizes,
            (std::vector<int64_t>{4, 2}));
  EXPECT_EQ(of_tensor_rank(small).groups, 2);  // each twice
  EXPECT_THAT(small.lost, IsEmpty());
}

TEST(ShrinkHeads, SeveralGroupsPerContextRankStaySeveral) {
  const Shrunk small =
      shrunk(std::string(kLlama) + "--cp-comm-type a2a --context-parallel-size 2", 2);
  EXPECT_EQ(of_tensor_rank(small), (HeadsOfRank{8, 4}));
}

TEST(ShrinkHeads, ARingDividesNoHeads) {
  const Shrunk small =
      shrunk(std::string(kLlama) + "--tensor-model-parallel-size 2 --context-parallel-size 4", 8);
  EXPECT_EQ(of_tensor_rank(small), (HeadsOfRank{4, 2}));
}

TEST(ShrinkHeads, TensorRanksThatShareGroupsShareSeveral) {
  const Shrunk small =
      shrunk(std::string(kLlama) + "--num-query-groups 2 --tensor-model-parallel-size 8", 8);
  EXPECT_EQ(small.arguments.transformer.num_query_groups, 2);
  EXPECT_EQ(small.arguments.parallel.tensor_model_parallel_size, 4);
}

TEST(ShrinkHeads, WhatIsLostIsNamed) {
  // Two context ranks cannot exceed two groups.
  EXPECT_THAT(shrunk(std::string(kLlama) + "--cp-comm-type a2a --tensor-model-parallel-size 4 "
                                           "--context-parallel-size 4",
                     16, /*max_axis=*/2)
                  .lost,
              IsEmpty());
  EXPECT_THAT(
      shrunk(std::string(kLlama) + "--tensor-model-parallel-size 4", 4, /*max_axis=*/1).lost,
      Contains("1 tensor ranks, 4 in the model"));
  EXPECT_THAT(shrunk(std::string(kLlama) + "--num-query-groups 2 --tensor-model-parallel-size 8", 8,
                     /*max_axis=*/2)
                  .lost,
              ElementsAre("1 groups of keys and values, 2 in the model"));
}

TEST(ShrinkHeads, FactorsOfLongropeFitTheHeads) {
  std::string factors;
  for (int i = 0; i < 64; ++i) factors += " 1.5";
  const TransformerConfig t =
      shrunk(std::string(kLlama) +
                 "--tensor-model-parallel-size 2 --rope-scaling-type longrope "
                 "--longrope-short-factor" +
                 factors + " --longrope-long-factor" + factors,
             2)
          .arguments.transformer;
  EXPECT_EQ(static_cast<int64_t>(t.longrope_long_factor.size()), t.kv_channels / 2);
}

// -- layers

// Of each segment a letter per layer: w windowed, f full.
std::vector<std::string> windows(const Arguments& a) {
  std::vector<std::string> all;
  const StageLayout layout = make_stage_layout(a.pipeline, a.parallel.pipeline_model_parallel_size,
                                               a.transformer.num_layers);
  for (const StageSlice& slice : layout.segments()) {
    std::string segment;
    for (int64_t i = 1; i <= slice.num_layers; ++i)
      segment += a.transformer.window(slice.first_layer + i).empty() ? 'f' : 'w';
    all.push_back(segment);
  }
  return all;
}

std::vector<std::string> windows_of(const std::string& flags, int64_t world_size) {
  return windows(shrunk(std::string(kGemma) + flags, world_size).arguments);
}

TEST(ShrinkDepth, SegmentsThatBeginInsideAPatternStillDo) {
  // 17 layers a stage: the second begins with the last but one before a full layer.
  EXPECT_THAT(windows_of("--num-layers 34 --pipeline-model-parallel-size 2", 2),
              ElementsAre("wwfw", "wfww"));
  // Stages of whole patterns.
  EXPECT_THAT(windows_of("--num-layers 48 --pipeline-model-parallel-size 4", 4), Each("wwf"));
  // Of the 4 chunks of 3 layers every other one has a full layer.
  EXPECT_THAT(windows_of("--num-layers 12 --pipeline-model-parallel-size 2 "
                         "--num-virtual-stages-per-pipeline-rank 2",
                         2),
              ElementsAre("ww", "wf", "ww", "wf"));
  // One stage has layers of both kinds.
  EXPECT_THAT(windows_of("--num-layers 34 --tensor-model-parallel-size 2", 2), ElementsAre("wwf"));
}

// The first and the last layers stay in bf16, and others do not.
TEST(ShrinkDepth, QuantisedLayersStayBetweenOthers) {
  const auto quantised = [](const std::string& flags, int64_t world_size) {
    const TransformerConfig t =
        shrunk(
            "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 "
            "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 " +
                flags,
            world_size)
            .arguments.transformer;
    std::string layers;
    for (int64_t layer = 1; layer <= t.num_layers; ++layer)
      layers += t.quantization(layer).recipe == QuantizationRecipe::kNone ? '-' : 'q';
    return layers;
  };
  EXPECT_EQ(quantised("--num-layers 32", 2), "-q-");
  EXPECT_EQ(quantised("--num-layers 32 --num-layers-at-start-in-bf16 4 "
                      "--num-layers-at-end-in-bf16 0",
                      2),
            "--q");
  EXPECT_EQ(quantised("--num-layers 32 --pipeline-model-parallel-size 2", 2), "-qq-");
}

TEST(ShrinkDepth, APatternOfTwoAndNoPattern) {
  const auto of = [](const char* flags) {
    return windows(shrunk("--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
                          "--pipeline-model-parallel-size 2 --window-size 255 0 " +
                              std::string(flags),
                          2)
                       .arguments);
  };
  EXPECT_THAT(of("--num-layers 26 --window-attn-skip-freq 2"), ElementsAre("wfw", "fwf"));
  EXPECT_THAT(of("--num-layers 24 --window-attn-skip-freq 2"), ElementsAre("wf", "wf"));
  EXPECT_THAT(of("--num-layers 24 --window-attn-skip-freq 999999999"), ElementsAre("ww", "ww"));
  EXPECT_THAT(of("--num-layers 24"), ElementsAre("ww", "ww"));
}

TEST(ShrinkDepth, ListsOfLayersAreCutWhereTheyRepeat) {
  const Shrunk small = shrunk(
      "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --num-layers 8 "
      "--context-parallel-size 2 --pipeline-model-parallel-size 2 "
      "--cp-comm-type a2a all_gather a2a all_gather a2a all_gather a2a all_gather "
      "--window-size 255 0 --window-attn-skip-freq [1,0,1,0,1,0,1,0]",
      4);
  EXPECT_EQ(small.arguments.transformer.num_layers, 4);
  EXPECT_THAT(small.arguments.transformer.cp_comm_type,
              ElementsAre("a2a", "all_gather", "a2a", "all_gather"));
  EXPECT_EQ(small.arguments.transformer.window_attn_skip_freq, "[1,0,1,0]");
  EXPECT_THAT(small.changes, Contains("--cp-comm-type of the first 4 layers"));
}

// Kinds that have letters; there is no flag for them yet.
TEST(ShrinkDepth, EverySegmentHasTheLettersThatItHad) {
  std::vector<std::string> changes, lost;
  Shrinker shrinker(changes, lost);
  TransformerConfig t;
  t.num_layers = 16;
  t.layer_pattern = "*-,M,M,M";
  shrink_depth(t, /*segments=*/2, /*stages=*/2, shrinker);
  EXPECT_EQ(t.num_layers, 6);  // with 4 the second stage would have no attention
  EXPECT_THAT(changes, ElementsAre("--num-layers 16 -> 6"));
}

TEST(ShrinkDepth, ADepthThatNoSmallerOneReplacesIsKept) {
  const TransformerConfig t =
      shrunk(
          "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --num-layers 6 "
          "--context-parallel-size 2 --pipeline-model-parallel-size 2 "
          "--cp-comm-type a2a a2a a2a a2a a2a all_gather",
          4)
          .arguments.transformer;
  EXPECT_EQ(t.num_layers, 6);
  EXPECT_EQ(t.cp_comm_type.back(), "all_gather");
}

TEST(ShrinkDepth, OneOrSeveralTokensAreStillPredictedAhead) {
  for (const auto& [before, after] : {std::pair{0, 0}, {1, 1}, {2, 2}, {5, 2}}) {
    const Shrunk small = shrunk(cat(kLlama, "--mtp-num-layers ", before), 1);
    EXPECT_EQ(small.arguments.transformer.mtp_num_layers, after);
    EXPECT_THAT(small.lost, IsEmpty());
  }
}

TEST(ShrinkDepth, RecomputationKeepsARemainder) {
  const auto of = [](const char* flags) {
    const TransformerConfig t =
        shrunk(
            "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --num-layers 24 "
            "--pipeline-model-parallel-size 2 --recompute-granularity full "
            "--recompute-num-layers " +
                std::string(flags),
            2)
            .arguments.transformer;
    return std::pair(t.num_layers, t.recompute_num_layers);
  };
  EXPECT_EQ(of("5"), (std::pair<int64_t, int64_t>(6, 2)));
  EXPECT_EQ(of("1 --recompute-method block"), (std::pair<int64_t, int64_t>(4, 1)));
  EXPECT_EQ(of("12"), (std::pair<int64_t, int64_t>(4, 4)));
}

// -- blocks of 128

constexpr const char* kBlocks = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise ";

// The rules that shrink() ends with refuse parts of blocks.
TEST(ShrinkBlocks, ProductsOfEveryRankHaveWholeOnes) {
  const auto quantised = [](const std::string& model, const std::string& ranks,
                            int64_t world_size) {
    SCOPED_TRACE(model + ranks);
    const Shrunk small = shrunk(model + kBlocks + ranks, world_size);
    const TransformerConfig& t = small.arguments.transformer;
    EXPECT_EQ(t.quantization(1).recipe, QuantizationRecipe::kBlockwise);
    EXPECT_EQ(t.hidden_size, 128);
    EXPECT_THAT(small.lost, ElementsAre(HasSubstr("1 blocks of the hidden size, ")));
    return t;
  };
  const TransformerConfig one = quantised(kLlama, "", 2);
  EXPECT_EQ(one.num_attention_heads * one.kv_channels, 128);
  EXPECT_EQ(one.seq_length, 128);
  const TransformerConfig both = quantised(
      kLlama, "--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2 ", 16);
  EXPECT_EQ(both.num_attention_heads * both.kv_channels, 4 * 128);
  EXPECT_EQ(both.seq_length, 2 * 128);
  // Two samples fill a block together.
  EXPECT_EQ(quantised(kLlama, "--micro-batch-size 2 ", 2).seq_length, 64);
  quantised(kLlama, "--tensor-model-parallel-size 4 --num-query-groups 2 ", 4);
  quantised(kLlama, "--context-parallel-size 4 --cp-comm-type a2a ", 4);
  quantised(std::string(kGemma) + "--num-layers 34 ", "--tensor-model-parallel-size 2 ", 2);
}

TEST(ShrinkBlocks, LatentsAndExpertsHaveWholeOnes) {
  for (const int64_t values : {128, 256, 512})
    for (const int64_t tp : {1, 2, 4}) {
      const Shrunk small = shrunk(
          cat("--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
              "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-layernorm "
              "--qk-head-dim 128 --qk-pos-emb-head-dim 128 --position-embedding-type rope "
              "--rotary-scaling-factor 40 --disable-bias-linear --num-experts 8 "
              "--moe-router-topk 2 --moe-shared-expert-intermediate-size 1024 --sequence-parallel "
              "--v-head-dim ",
              values, " --tensor-model-parallel-size ", tp, " ", kBlocks),
          4);
      const TransformerConfig& t = small.arguments.transformer;
      EXPECT_EQ(t.quantization(1).recipe, QuantizationRecipe::kBlockwise);
      EXPECT_EQ(t.v_head_dim < t.query_head_size(), values < 256);
      EXPECT_EQ(t.v_head_dim > t.query_head_size(), values > 256);
    }
}

// -- buckets

constexpr const char* kZero1 =
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather ";

// Gradient buckets of each chunk of the tiny model.
std::vector<int> buckets(const Shrunk& small) {
  const LayoutPlan plan = make_layout_plan(small.arguments, {101, 104}, /*on_gpu=*/false);
  std::vector<int> all;
  for (int stage = 0; stage < static_cast<int>(plan.pipeline); ++stage)
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk)
      all.push_back(plan.buffers(stage, chunk).front().layout.num_trained_buckets);
  return all;
}

TEST(ShrinkBuckets, ThereAreThreeWhereTheModelHasMore) {
  const Shrunk small = shrunk(std::string(kLlama) + kZero1, 4);
  EXPECT_THAT(buckets(small), Each(testing::Ge(3)));
  EXPECT_THAT(small.changes, Contains(HasSubstr("--ddp-bucket-size ")));
  EXPECT_THAT(small.lost, IsEmpty());
  EXPECT_THAT(buckets(shrunk(std::string(kLlama) + kZero1 +
                                 "--pipeline-model-parallel-size 2 "
                                 "--num-virtual-stages-per-pipeline-rank 2",
                             4)),
              Each(testing::Ge(3)));
  EXPECT_THAT(
      buckets(shrunk(std::string(kLlama) + "--use-megatron-fsdp --data-parallel-sharding-strategy "
                                           "optim_grads",
                     2)),
      Each(testing::Ge(3)));
}

TEST(ShrinkBuckets, OneStaysOne) {
  const auto unchanged = [](const std::string& flags, int64_t world_size) {
    const Shrunk small = shrunk(std::string(kLlama) + flags, world_size);
    EXPECT_THAT(small.changes, Each(testing::Not(HasSubstr("bucket"))));
    return buckets(small);
  };
  // The gradients are summed after the backward: no buckets.
  EXPECT_THAT(unchanged("--use-distributed-optimizer", 4), ElementsAre(1));
  EXPECT_THAT(unchanged(kZero1 + std::string("--ddp-num-buckets 1"), 4), ElementsAre(1));
  unchanged("--use-megatron-fsdp", 4);  // a layer is a bucket
  unchanged("--tensor-model-parallel-size 2 --overlap-grad-reduce", 2);
}

TEST(ShrinkBuckets, AGivenNumberOrSizeIsReplacedWhereItLeavesTooFew) {
  const Shrunk sized = shrunk(kLlama + std::string(kZero1) + "--ddp-bucket-size 100000000", 4);
  EXPECT_THAT(buckets(sized), Each(testing::Ge(3)));
  EXPECT_THAT(sized.changes, Contains(HasSubstr("--ddp-bucket-size 100000000 -> ")));
  EXPECT_THAT(buckets(shrunk(kLlama + std::string(kZero1) + "--ddp-num-buckets 3", 4)),
              Each(testing::Ge(3)));
}

}  // namespace
}  // namespace megatron
