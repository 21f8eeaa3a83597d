// Questions and answers as two streams of different length with a column of
// weights: what is read from a file, what the loader gives, and every layout
// against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/datasets/answer_dataset.h"
#include "megatron/datasets/data_loader.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "tests/extension/proofs.h"

namespace megatron {
namespace {

using Ids = std::vector<int64_t>;

std::shared_ptr<const IndexedDataset> write_file(const std::vector<std::vector<Ids>>& documents) {
  const std::string prefix = testing::TempDir() + "/answers";
  IndexedDatasetBuilder builder(prefix, IndexedType::kUInt16);
  for (const std::vector<Ids>& sequences : documents) {
    for (const Ids& ids : sequences) builder.add_sequence(ids);
    builder.end_document();
  }
  builder.finish();
  return std::make_shared<const IndexedDataset>(prefix);
}

constexpr AnswerDatasetConfig kConfig = {.sequence_length = 8, .seed = 3, .pad = 0};

TEST(AnswerDataset, StreamsAreReadFromTheirFile) {
  const auto file = write_file(
      {{{1, 2}, {3, 4, 5}}, {{10, 11, 12, 13, 14, 15, 16}, {20}}, {{7}, {30, 31, 32, 33, 34, 35}}});
  const AnswerDataset dataset(answers_of(file, 0, 3), "\"file\"", 3, 6, kConfig);
  EXPECT_EQ(dataset.columns().text(),
            "tokens int64 [8], answer int64 [4], answer_weight float32 [4]");
  EXPECT_EQ(first_answer(8), 4);
  int seen = 0;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const Sample sample = dataset.sample(i);
    const Ids tokens = sample.get<int64_t>("tokens"), answer = sample.get<int64_t>("answer");
    const std::vector<float> weight = sample.get<float>("answer_weight");
    EXPECT_NEAR(std::accumulate(weight.begin(), weight.end(), 0.0), 1.0, 1e-6);
    if (answer[0] == 3) {
      EXPECT_EQ(tokens, (Ids{0, 0, 0, 1, 2, 3, 4, 0}));
      EXPECT_EQ(answer, (Ids{3, 4, 5, 0}));
      EXPECT_EQ(weight, (std::vector<float>{1.0F / 3, 1.0F / 3, 1.0F / 3, 0.0F}));
      ++seen;
    } else if (answer[0] == 20) {
      EXPECT_EQ(tokens, (Ids{12, 13, 14, 15, 16, 0, 0, 0}));
      EXPECT_EQ(answer, (Ids{20, 0, 0, 0}));
    } else {
      EXPECT_EQ(tokens, (Ids{0, 0, 0, 0, 7, 30, 31, 32}));
      EXPECT_EQ(answer, (Ids{30, 31, 32, 33}));
    }
  }
  EXPECT_EQ(seen, 2) << "two epochs";
}

TEST(AnswerDataset, OtherDocumentsAreRefused) {
  const auto file = write_file({{{1, 2}}});
  const AnswerDataset dataset(answers_of(file, 0, 1), "\"file\"", 1, 1, kConfig);
  try {
    dataset.sample(0);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("has 1 sequences, expected a question and an answer"),
              std::string::npos);
  }
}

TEST(AnswerDataset, TheLoaderGivesEveryColumnInItsLength) {
  const auto dataset =
      std::make_shared<const AnswerDataset>(mock_answers(1, 50, 8), "\"mock\"", 10, 10, kConfig);
  DataLoaderOptions options;
  options.sampler.micro_batch_size = 2;
  DataLoader loader(dataset, options);
  const auto batch = loader.next();
  ASSERT_NE(batch, nullptr);
  EXPECT_EQ(batch->data().all<int64_t>("tokens").size(), 16u);
  EXPECT_EQ(batch->data().all<int64_t>("answer").size(), 8u);
  EXPECT_EQ(batch->data().all<float>("answer_weight").size(), 8u);
  const Ids second = dataset->sample(batch->sample_ids[1]).get<int64_t>("answer");
  EXPECT_TRUE(std::ranges::equal(batch->data().row<int64_t>("answer", 1), second));
}

class AnswerLayouts : public testing::TestWithParam<ProvedLayout> {};

constexpr const char* kRun =
    "--task answers --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 101 "
    "--make-vocab-size-divisible-by 8 --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 0 --device cpu --lr 1e-2 "
    "--train-iters 10 --adam-eps 1e-3 --num-layers 4 "
    "--hidden-size 48 --num-attention-heads 4 "
    "--seq-length 24 --init-method-std 0.2 ";

TEST_P(AnswerLayouts, TrainWhatOneRankTrains) {
  EXPECT_EQ(differences_in_fp64(cat(kRun, GetParam().flags), GetParam().ranks), "");
}

INSTANTIATE_TEST_SUITE_P(Proofs, AnswerLayouts, testing::ValuesIn(proved_layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
