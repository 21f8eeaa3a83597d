// What is refused of experts: every rule, by one message each, before anything runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/error_of.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

using testing::HasSubstr;

constexpr const char* kExperts =
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --tokenizer-type ByteLevelTokenizer --mock-data --swiglu "
    "--disable-bias-linear --ffn-hidden-size 48 --num-experts 8 ";

struct Refused {
  const char* flags;
  int64_t ranks;
  const char* says;
};

class ExpertRules : public testing::TestWithParam<Refused> {};

TEST_P(ExpertRules, RefuseWithOneMessage) {
  const std::string error =
      error_of([] { parse_line(cat("pretrain ", kExperts, GetParam().flags), GetParam().ranks); });
  EXPECT_THAT(error, HasSubstr(GetParam().says));
}

constexpr Refused kRefused[] = {
    {"--activation-func-clamp-value 0", 1, "--activation-func-clamp-value 0 must be positive"},
    {"--activation-func-clamp-value 7 --moe-layer-freq 2", 1,
     "--activation-func-clamp-value is built for experts, not for MLPs and shared experts"},
    {"--activation-func-clamp-value 7 --moe-shared-expert-intermediate-size 16", 1,
     "--activation-func-clamp-value is built for experts, not for MLPs and shared experts"},
    {"--swiglu false --squared-relu --activation-func-clamp-value 7", 1,
     "--activation-func-clamp-value bounds gated activations only"},
    {"--softmax-type learnable --multi-latent-attention --position-embedding-type rope", 1,
     "--softmax-type with --multi-latent-attention is not built"},
    {"--moe-use-upcycling --save out", 1,
     "--moe-use-upcycling has no dense checkpoint to start from\nhint: name it with --load"},
    {"--moe-use-upcycling --load dense --save out --start-mode fresh", 1,
     "--moe-use-upcycling has no dense checkpoint to start from"},
    {"--moe-use-upcycling --load dense", 1,
     "--moe-use-upcycling has no folder for the model with experts"},
    {"--moe-use-upcycling --load dense --save out --moe-upcycling-granularity 3", 1,
     "--num-experts 8 is not divisible by --moe-upcycling-granularity 3\nhint: granularities that "
     "divide it: 1, 2, 4, 8"},
    {"--moe-use-upcycling --load dense --save out --moe-upcycling-granularity 0", 1,
     "--moe-upcycling-granularity 0 must be positive"},
    {"--moe-upcycling-granularity 2", 1,
     "--moe-upcycling-granularity has an effect only with --moe-use-upcycling"},
    {"--moe-use-upcycling --load dense --save out --moe-shared-expert-intermediate-size 16", 1,
     "--moe-shared-expert-intermediate-size with --moe-use-upcycling is not built: a dense model "
     "has no such expert"},
    {"--moe-use-upcycling --load dense --save out --moe-latent-size 16", 1,
     "--moe-latent-size with --moe-use-upcycling is not built"},
    {"--moe-use-upcycling --load dense --save out --task dpo", 1,
     "--task dpo with --moe-use-upcycling is not built: the reference model would be the dense"},
    {"--num-experts -1", 1, "--num-experts -1 is negative"},
    {"--moe-router-topk 9", 1, "--moe-router-topk 9: expected 1 to --num-experts 8"},
    {"--moe-router-topk 1", 1, "gives it the weight 1 whatever the router says"},
    {"--moe-router-enable-expert-bias", 1, "needs scores that do not depend on each other"},
    {"--moe-router-score-function sigmoid --moe-router-pre-softmax", 1,
     "has an effect only with --moe-router-score-function softmax"},
    {"--moe-router-bias-update-rate 0.1", 1, "only with --moe-router-enable-expert-bias"},
    {"--moe-router-num-groups 4", 1, "are given together or not at all"},
    {"--moe-router-num-groups 3 --moe-router-group-topk 1", 1,
     "--num-experts 8 is not divisible by --moe-router-num-groups 3\nhint: groups that divide it: "
     "1, 2, 4, 8"},
    {"--moe-router-num-groups 4 --moe-router-group-topk 5", 1,
     "--moe-router-group-topk 5: expected"},
    {"--moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-topk 3", 1,
     "--moe-router-topk 3 exceeds the experts of 1 groups, 2"},
    {"--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk 2", 1,
     "--moe-router-topk 2 is below --moe-router-group-topk 4"},
    {"--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1", 1,
     "--moe-router-load-balancing-type has 2 values and --moe-aux-loss-coeff 1"},
    {"--moe-router-load-balancing-type aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1", 1,
     "aux_loss is given twice"},
    {"--moe-router-load-balancing-type even --moe-aux-loss-coeff 0.1", 1, "even is unknown"},
    {"--moe-router-load-balancing-type seq_aux_loss", 1,
     "has no effect with --moe-aux-loss-coeff 0"},
    {"--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", 1,
     "--moe-aux-loss-coeff 0.1 has no effect with none"},
    {"--moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1", 1,
     "sinkhorn has its own choice and weights"},
    {"--moe-token-drop-policy position", 1, "only with --moe-expert-capacity-factor"},
    {"--moe-pad-expert-input-to-capacity", 1, "needs --moe-expert-capacity-factor"},
    {"--moe-expert-capacity-factor 0", 1, "--moe-expert-capacity-factor 0 must be positive"},
    {"--moe-expert-rank-capacity-factor 0.5", 1, "0.5 is below 1, a balanced share"},
    {"--moe-apply-probs-on-input", 1, "--moe-apply-probs-on-input needs --moe-router-topk 1"},
    {"--moe-shared-expert-gate", 1, "needs --moe-shared-expert-intermediate-size"},
    {"--moe-layer-freq [1,0]", 1,
     "--moe-layer-freq [1,0]: expected a positive integer, or a list of 4"},
    {"--moe-layer-freq [0]*4", 1, "with a one"},
    {"--moe-layer-freq __import__('os')", 1, "expected a positive integer"},
    {"--moe-latent-size 0", 1, "--moe-latent-size 0 must be positive"},
    {"--moe-input-jitter-eps 1", 1, "--moe-input-jitter-eps 1 is outside (0, 1)"},
    {"--moe-router-force-biased 1", 1, "needs --moe-router-force-load-balancing"},
    {"--moe-shared-expert-overlap --moe-token-dispatcher-type alltoall", 1,
     "needs --moe-shared-expert-intermediate-size"},
    {"--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 8", 1,
     "has an effect only with --moe-token-dispatcher-type alltoall or flex"},
    {"--recompute-granularity selective --recompute-modules shared_experts", 1,
     "--recompute-modules shared_experts needs --moe-shared-expert-intermediate-size"},
    {"--moe-layer-recompute --recompute-granularity full --recompute-method uniform", 1,
     "--moe-layer-recompute asks for selective recomputation, but --recompute-granularity is full"},
    {"--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8 --reset-attention-mask "
     "--expert-model-parallel-size 2",
     2, "--hybrid-context-parallel with experts on 2 ranks is not built"},
    {"--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8 --reset-attention-mask "
     "--moe-aux-loss-coeff 0.1",
     2, "--hybrid-context-parallel with losses of balance"},
    {"--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 8 --reset-attention-mask "
     "--moe-routing-record a",
     2, "--hybrid-context-parallel with --moe-routing-record is not built"},
    {"--moe-enable-routing-replay", 1, "without --moe-routing-record or --moe-routing-replay"},
    {"--moe-routing-record a --moe-routing-replay a", 1,
     "--moe-routing-record and --moe-routing-replay name one folder, a"},
    {"--moe-routing-replay a --moe-router-force-load-balancing", 1,
     "--moe-router-force-load-balancing has no effect with --moe-routing-replay"},
    {"--cuda-graph-impl local --moe-routing-record a", 1,
     "--cuda-graph-impl local with --moe-routing-record or --moe-routing-replay is not built"},
    {"--moe-enable-deepep", 1, "it takes --num-experts and --moe-token-dispatcher-type flex"},
    {"--overlap-dispatch-backward-with-experts-wgrad", 1, "rows of experts travel with"},
    {"--fine-grained-activation-offloading --offload-modules mlp_act", 1,
     "--offload-modules mlp_act has no effect: every layer has experts"},
    // With ranks
    {"--expert-model-parallel-size 3", 3, "--num-experts 8 is not divisible by"},
    {"--expert-model-parallel-size 4", 2,
     "the 2 ranks of a pipeline stage are not divisible by --expert-model-parallel-size 4"},
    {"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2", 2,
     "which is --tensor-model-parallel-size by default"},
    {"--tensor-model-parallel-size 2", 2, "need --sequence-parallel"},
    {"--expert-tensor-parallel-size 5", 5,
     "--ffn-hidden-size 48 is not divisible by --expert-tensor-parallel-size 5"},
    {"--use-distributed-optimizer --num-distributed-optimizer-instances 2 "
     "--expert-model-parallel-size 2",
     2, "does not divide the 1 ranks that hold the same experts"},
    {"--use-tp-pp-dp-mapping --expert-model-parallel-size 2", 4,
     "--use-tp-pp-dp-mapping needs --expert-model-parallel-size 2"},
    {"--cuda-graph-impl local --expert-model-parallel-size 2", 2,
     "every layer exchanges rows with others"},
    {"--cuda-graph-impl local --moe-router-force-load-balancing", 1,
     "a graph would draw the same numbers in every step"},
    {"--fp4-format e2m1 --bf16", 1, "--fp4-format with --num-experts is not built yet"},
    {"--fp8-format hybrid --bf16 --moe-ffn-hidden-size 24", 1,
     "--moe-ffn-hidden-size is 24, which --fp8-format needs to be a multiple of 16"},
    {"--fp8-format hybrid --bf16 --moe-ffn-hidden-size 24", 1, "nearest that fit: 16, 32"},
    {"--fp8-format hybrid --bf16 --moe-ffn-hidden-size 48 --expert-tensor-parallel-size 2", 2,
     "--moe-ffn-hidden-size / --expert-tensor-parallel-size is 24, which --fp8-format needs to be "
     "a multiple of 16"},
    {"--fp8-format hybrid --bf16 --moe-latent-size 24", 1, "--moe-latent-size is 24, which"},
    {"--fp8-format hybrid --bf16 --moe-shared-expert-intermediate-size 8", 1,
     "--moe-shared-expert-intermediate-size is 8, which --fp8-format"},
    {"--fp8-format hybrid --fp8-recipe blockwise --bf16 --moe-ffn-hidden-size 192", 1,
     "--moe-ffn-hidden-size is 192, which --fp8-format needs to be a multiple of 128"},
    {"--lora-rank 4 --lora-targets linear_fc2", 1,
     "--lora-targets linear_fc2: every layer of this model has routed experts"},
};
INSTANTIATE_TEST_SUITE_P(Rules, ExpertRules, testing::ValuesIn(kRefused));

// Biases of experts; flags of experts without experts.
TEST(ExpertFlags, BiasesAndLostFlags) {
  const std::string biases =
      "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
      "--micro-batch-size 2 "
      "--train-iters 10 --lr 1e-3 --tokenizer-type ByteLevelTokenizer --mock-data ";
  const auto says = [&](const std::string& flags, int64_t ranks) {
    return error_of([&] { parse_line("pretrain " + biases + flags, ranks); });
  };
  EXPECT_THAT(says("--num-experts 4 --expert-tensor-parallel-size 2", 2),
              HasSubstr("biases of experts with --expert-tensor-parallel-size 2 are not built"));
  EXPECT_THAT(says("--num-experts 4 --moe-shared-expert-intermediate-size 8", 1),
              HasSubstr("--moe-shared-expert-intermediate-size with biases is not built"));
  const std::string lost = says("--moe-router-topk 4 --moe-layer-freq 2", 1);
  EXPECT_THAT(lost, HasSubstr("--moe-router-topk has no effect without --num-experts"));
  EXPECT_THAT(lost, HasSubstr("--moe-layer-freq has no effect without --num-experts"));
}

TEST(ExpertFlags, LayersWithExperts) {
  const auto layers = [](const char* freq) {
    const Arguments arguments =
        parse_line(cat("pretrain ", kExperts, "--num-layers 6 --moe-layer-freq ", freq), 1);
    std::string text;
    for (int64_t layer = 1; layer <= 6; ++layer)
      text += arguments.transformer.is_moe_layer(layer) ? '1' : '0';
    return text;
  };
  EXPECT_EQ(layers("1"), "111111");
  EXPECT_EQ(layers("2"), "101010");
  EXPECT_EQ(layers("([0]+[1]*2)*2"), "011011");
  EXPECT_EQ(layers("[0,0,0,1,1,1]"), "000111");
}

}  // namespace
}  // namespace megatron
