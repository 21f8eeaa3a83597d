// Encoders and encoder-decoders without padding: the numbers are those of the run with padding, and
// nothing behind a sample's end is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "megatron/datasets/data_loader.h"
#include "megatron/tensor/torch.h"
#include "megatron/tokenizers/tokenizer.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/proving/equivalence.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

constexpr const char* kPaddedRun =
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 "
    "--num-workers 0 --eval-iters 0 --device cpu --lr "
    "1e-2 --train-iters 4 --adam-eps 1e-3 --init-method-std 0.2 ";
constexpr const char* kSmallPadded =
    "--hidden-size 48 --num-attention-heads 4 --seq-length 24 --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --micro-batch-size 4 --global-batch-size 8 ";

struct PaddedCase {
  const char* name;
  const char* flags;
};

void PrintTo(const PaddedCase& c, std::ostream* out) { *out << c.name; }

class Padding : public testing::TestWithParam<PaddedCase> {};

TEST_P(Padding, CanBeLeftOut) {
  const auto trace = [](const char* flags) {
    const Arguments arguments =
        parse_run(cat(kPaddedRun, kSmallPadded, GetParam().flags, flags), 1);
    return trace_training(find_task(arguments), arguments, {.num_steps = 3, .updates = false});
  };
  const TrainingTrace padded = trace(" --remove-padding false"),
                      unpadded = trace(" --remove-padding true");
  ASSERT_EQ(padded.steps.size(), 3U);
  for (size_t step = 0; step < padded.steps.size(); ++step) {
    const LogicalTensors &expected = padded.steps[step].grads, &grads = unpadded.steps[step].grads;
    ASSERT_GT(expected.size(), 10U);
    for (const auto& [name, grad] : expected) {
      const double norm = grad.norm().item<double>();
      EXPECT_LE((grads.at(name) - grad).norm().item<double>(), 1e-11 * norm + 1e-13)
          << name << ", step " << step + 1;
    }
    const double loss = padded.steps[step].number("loss");
    EXPECT_NEAR(unpadded.steps[step].number("loss"), loss, 1e-11 * loss);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Padding,
    testing::Values(
        PaddedCase{"bert", "--task bert --num-layers 2 --mask-prob 0.3"},
        PaddedCase{"bert_rope_grouped",
                   "--task bert --bert-no-binary-head --num-layers 2 --position-embedding-type "
                   "rope --group-query-attention --num-query-groups 2 --qk-layernorm"},
        PaddedCase{"bert_sums_grouped",
                   "--task bert --num-layers 2 --norm-placement residual --bert-embedding-norm "
                   "--bert-first-position 2 --group-query-attention --num-query-groups 2 "
                   "--softmax-type learnable"},
        PaddedCase{"bert_windows",
                   "--task bert --num-layers 3 --window-size 3 3 --window-attn-skip-freq 3 "
                   "--position-embedding-type rope --rotary-base-local 50"},
        PaddedCase{"classes_of_means",
                   "--task classify --bert-classes 3 --num-layers 2 --bert-pooling mean"},
        PaddedCase{"classes", "--task classify --bert-classes 3 --num-layers 2"},
        PaddedCase{"choices", "--task multichoice --bert-choices 2 --num-layers 2"},
        PaddedCase{"t5", "--task t5 --num-layers 2 --decoder-seq-length 12"},
        PaddedCase{"seq2seq", "--task seq2seq --num-layers 2 --decoder-seq-length 12"},
        PaddedCase{"t5_rope",
                   "--task t5 --num-layers 2 --decoder-seq-length 24 --position-embedding-type "
                   "rope --untie-embeddings-and-output-weights"},
        PaddedCase{"t5_relative",
                   "--task t5 --num-layers 2 --decoder-seq-length 12 --position-embedding-type "
                   "relative --relative-attention-num-buckets 8 "
                   "--relative-attention-max-distance 7"}),
    [](const auto& info) { return std::string(info.param.name); });

// The rows that leave the stages of a model.
TEST(Padding, IsComputedInNoLayer) {
  for (const char* flags : {"--task bert --num-layers 2",
                            "--task t5 --num-layers 1 "
                            "--decoder-seq-length 12"}) {
    const Arguments arguments = parse_run(cat(kPaddedRun, kSmallPadded, flags), 1);
    const PretrainTask task = find_task(arguments);
    const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
    const ParallelGroups groups;
    const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);
    const std::unique_ptr<DataLoader> loader =
        make_train_loader(arguments, groups, datasets.train, /*consumed=*/0, at::kCPU);
    TrainedModel model = build_model(task, arguments, vocabulary_of(arguments, *tokenizer), groups,
                                     at::kFloat, at::kCPU, StartPoint{});
    BatchMaker maker(at::kCPU, groups.cp, unpadded_row_multiple(arguments));
    const std::shared_ptr<const MicroBatch> source = loader->next();
    const Batch batch = maker.make(source);
    ASSERT_FALSE(batch.unpadded.empty());
    int64_t texts = 0, rows = 0, all = 0;
    for (const auto& [name, of] : batch.unpadded) {
      texts += std::accumulate(of->lengths.begin(), of->lengths.end(), int64_t{0});
      rows += of->rows;
      all += of->samples * of->length;
      EXPECT_LT(of->rows, of->samples * of->length);
    }
    EXPECT_EQ(text_tokens(*source), texts);
    EXPECT_GE(rows, texts);
    EXPECT_LE(rows - texts, (all + 31) / 32 + 2);
    ForwardContext context;
    context.place = batch.place;
    const at::NoGradGuard no_grad;
    for (ModelChunk& chunk : model.chunks) chunk.store->finish_param_sync();
    const StageTensors hidden = model.chunks.front().module->hidden(batch, {}, context);
    const UnpaddedRows& last = *batch.unpadded.back().second;
    EXPECT_EQ(hidden.front().sizes(), (at::IntArrayRef{last.rows, 1, 48}));
    EXPECT_TRUE(hidden.front().isfinite().all().item<bool>());
  }
}

TEST(Padding, StaysWhereLeavingItOutIsNotBuilt) {
  const auto run = [](const char* flags, int ranks) {
    return parse_run(cat(kPaddedRun, kSmallPadded, "--num-layers 2 ", flags), ranks);
  };
  EXPECT_EQ(unpadded_row_multiple(run("--task bert", 1)), 1);
  EXPECT_EQ(unpadded_row_multiple(run("--task bert --remove-padding false", 1)), 0);
  EXPECT_EQ(unpadded_row_multiple(
                run("--task bert --tensor-model-parallel-size 2 --sequence-parallel", 2)),
            2);
  EXPECT_EQ(unpadded_row_multiple(run("--max-position-embeddings 24", 1)), 0);
  EXPECT_EQ(unpadded_row_multiple(run("--task bert --context-parallel-size 2", 2)), 0);
  const auto refused = [&](const char* flags, int ranks) {
    return error_of([&] { run(flags, ranks); });
  };
  EXPECT_EQ(refused("--max-position-embeddings 24 --remove-padding true", 1),
            "--remove-padding true: samples of --task gpt have no padding\nhint: --remove-padding "
            "auto");
  EXPECT_EQ(refused("--task bert --context-parallel-size 2 --remove-padding true", 2),
            "--remove-padding true: --context-parallel-size divides each sample alike, with its "
            "padding\nhint: --remove-padding auto");
  EXPECT_EQ(refused("--task bert --num-experts 4 --remove-padding true", 1),
            "--remove-padding true: routers of --num-experts send padding to experts and count it "
            "in their losses\nhint: --remove-padding auto");
}

// Of texts that fill their samples; the plan also has the scores of attention with a mask.
TEST(Padding, IsInThePlanOfMemory) {
  for (const char* flags :
       {"--task bert --num-layers 4 --max-position-embeddings 256",
        "--task bert --num-layers 4 --position-embedding-type rope --group-query-attention "
        "--num-query-groups 4",
        "--task t5 --num-layers 2 --decoder-seq-length 128 --mask-prob 0.2"}) {
    for (const RankMemory& rank : memory_of_ranks(
             cat(kPaddedRun, flags,
                 " --hidden-size 128 --num-attention-heads 8 --seq-length 256 --attention-dropout "
                 "0 --micro-batch-size 2 --global-batch-size 8 --mock-lengths 256 256 "
                 "--remove-padding true"),
             1)) {
      EXPECT_GT(static_cast<double>(rank.planned), 0.98 * static_cast<double>(rank.metered))
          << flags;
    }
  }
}

}  // namespace
}  // namespace megatron
