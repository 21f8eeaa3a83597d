// BERT: what is refused, what `prove` says of layouts, and the memory of the plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

TEST(Bert, RefusesWhatIsNotBuilt) {
  const ParallelGroups groups;
  const auto refused = [&](const char* flag, const auto& change) {
    ModelConfig config;
    config.type = "bert";
    change(config, config.transformer);
    try {
      make_model(config, groups);
      ADD_FAILURE() << flag << " is accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), cat(flag, " is not built for BERT"));
    }
  };
  refused("--pipeline-vocab-parallel", [](auto& c, auto&) { c.pipeline_vocab_parallel = true; });
  refused("--cross-entropy-fusion-impl linear",
          [](auto&, auto& t) { t.cross_entropy_fusion_impl = CrossEntropyFusion::kLinear; });
  refused("--final-logit-softcapping", [](auto&, auto& t) { t.final_logit_softcapping = 30; });
  refused("--logits-scaling", [](auto&, auto& t) { t.logits_scaling = 8; });
  refused("--mtp-num-layers", [](auto&, auto& t) { t.mtp_num_layers = 1; });
  ModelConfig one_sided;
  one_sided.type = "bert";
  one_sided.transformer.window_size = {4, -1};
  EXPECT_EQ(error_of([&] { make_model(one_sided, groups); }),
            "--window-size 4 -1: tokens of a BERT see those before and behind them, and both sides "
            "of a window have a limit");
}

TEST(Bert, RefusesTheOrderOfAMean) {
  BertConfig own;
  own.bert_pooling = BertPooling::kMean;
  const auto refusals = [&] {
    Violations violations;
    own.validate(violations);
    return violations.messages();
  };
  EXPECT_EQ(refusals(),
            std::vector<std::string>({"--bert-pooling mean with the binary head is not built"}));
  own.bert_classes = 2;
  EXPECT_TRUE(refusals().empty());
}

// What nothing would train.
TEST(Bert, RefusesHeadsThatItDoesNotTrain) {
  const auto error = [](BertConfig own) {
    Arguments arguments;
    own_config<BertConfig>(arguments.own) = own;
    return error_of([&] { find_task("bert", arguments); });
  };
  BertConfig bare, pooled, classes;
  classes.bert_classes = 2;
  bare.bert_lm_head = bare.bert_binary_head = pooled.bert_binary_head = false;
  pooled.bert_pooler = true;
  EXPECT_EQ(error(bare),
            "--task bert trains the head of masked tokens, which the model has not "
            "(--bert-no-lm-head)\nhint: a model of Hugging Face has it with ForMaskedLM or "
            "ForPreTraining as its architecture");
  EXPECT_EQ(error(classes),
            "--task bert trains the heads of pretraining, in whose place --bert-classes puts "
            "another");
  EXPECT_EQ(error(pooled),
            "--bert-pooler: --task bert trains the pooler with the binary head alone\nhint: leave "
            "out --bert-no-binary-head");
}

constexpr const char* kRun =
    "--task bert --mock-data --tokenizer-type NullTokenizer --vocab-size 101 "
    "--make-vocab-size-divisible-by 8 --num-workers 0 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 0 --device cpu --lr 1e-2 --train-iters 10 --adam-eps 1e-3 --num-layers 4 "
    "--init-method-std 0.2 ";
constexpr const char* kSmall =
    "--hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 24 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 ";
#define MODERN                                                                                     \
  "--bert-no-binary-head --bert-no-head-bias --bert-embedding-norm --position-embedding-type "     \
  "rope --rotary-base-local 50 --window-size 5 5 --window-attn-skip-freq [0,1,1,0] --exact-geglu " \
  "--disable-bias-linear --disable-norm-bias --no-first-input-norm"
constexpr const char* kMeasured =
    "--hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout 0 ";

TEST(Bert, PlansTheScoresOfEveryPairOfTokens) {
  const Arguments arguments = parse_run(cat(kRun, kSmall), 1);
  const PretrainTask task = find_task(arguments);
  const Vocabulary vocabulary{101, 104};
  const LayoutPlan plan =
      make_layout_plan(arguments, vocabulary, /*on_gpu=*/false, task.model_provider);
  EXPECT_EQ(plan.layer_cost(1).first.score_products, 2.0 * 24 * 48);
  // Four layers; 3 of 24 positions are masked (0.15 x 21) and go through the head.
  const double layer = 4 * 48 * 48 + 2 * 48 * 96 + 2 * 24 * 48, head = 48 * 48 + 48 * 104;
  EXPECT_EQ(task.flops_per_token(arguments, vocabulary), 6 * (4 * layer + head * 3 / 24));
}

// Micro-batches have different numbers of masked tokens and the same number of samples. One
// micro-batch with means of its own is the mean over masked tokens plus that over samples.
TEST(Bert, DividesBothLossesByTheirOwnWeights) {
  const auto trace = [](const char* flags) {
    const Arguments arguments = parse_run(cat(kRun, kSmall, flags), 1);
    return trace_training(find_task(arguments), arguments, {.updates = false});
  };
  const TrainingTrace parts = trace("--micro-batch-size 2"),
                      whole = trace("--micro-batch-size 8 --no-calculate-per-token-loss");
  const LogicalTensors& grads = whole.steps.at(0).grads;
  ASSERT_FALSE(grads.empty());
  for (const auto& [name, expected] : grads) {
    const double difference = (parts.steps.at(0).grads.at(name) - expected).norm().item<double>();
    EXPECT_LE(difference, 1e-12 + 1e-10 * expected.norm().item<double>()) << name;
  }
  for (const char* loss : {"loss", "sop loss"})
    EXPECT_NEAR(parts.steps.at(0).number(loss), whole.steps.at(0).number(loss), 1e-12) << loss;
}

class EncoderLayouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(EncoderLayouts, AreProved) {
  EXPECT_EQ(unproved(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(EncoderLayouts, NeedTheMemoryOfThePlan) {
  for (const RankMemory& rank : memory_of_ranks(
           cat(kRun, kMeasured, "--remove-padding false ", GetParam().flags), GetParam().ranks)) {
    const double planned = static_cast<double>(rank.planned) / static_cast<double>(rank.metered);
    EXPECT_TRUE(planned > 0.98 && planned < 1.05) << rank.planned << " and " << rank.metered;
  }
}

// The matrix has the others.
std::vector<ProvedLayout> some_layouts() {
  std::vector<ProvedLayout> all = proved_layouts(), some;
  std::ranges::copy_if(all, std::back_inserter(some), [](const ProvedLayout& layout) {
    const std::string_view name = layout.name;
    return name == "tp2_sp" || name == "cp2" || name == "pp2_vpp2";
  });
  some.push_back({"tp2_sp_norms_of_sums", 2,
                  "--tensor-model-parallel-size 2 --sequence-parallel --norm-placement residual "
                  "--bert-embedding-norm --bert-first-position 2"});
  some.push_back(
      {"tp2_sp_lora", 2, "--tensor-model-parallel-size 2 --sequence-parallel --lora-rank 4"});
  some.push_back({"pp2_classes_lora", 2,
                  "--pipeline-model-parallel-size 2 --task classify --bert-classes 3 "
                  "--lora-rank 4 --lora-targets query value"});
  some.push_back(
      {"tp2_sp_modern", 2, "--tensor-model-parallel-size 2 --sequence-parallel " MODERN});
  some.push_back(
      {"pp2_zbh1_modern", 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 " MODERN});
  some.push_back(
      {"cp2_gather_modern", 2, "--context-parallel-size 2 --cp-comm-type all_gather " MODERN});
  some.push_back({"pp2_offload_modern", 2,
                  "--pipeline-model-parallel-size 2 --fine-grained-activation-offloading "
                  "--offload-modules attn_norm qkv_linear core_attn " MODERN});
  return some;
}

INSTANTIATE_TEST_SUITE_P(Proofs, EncoderLayouts, testing::ValuesIn(some_layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
