// What the samples of a proof are like.
#include "megatron/training/proving/proof_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

constexpr int64_t kLength = 48;
constexpr int64_t kMicroBatch = 2;

TrainValidTestDatasets sets_of(const std::string& task, const std::string& flags) {
  const Arguments a = parse_line(
      "pretrain --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --lr 1e-3 "
      "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --train-iters 14 "
      "--micro-batch-size 2 --global-batch-size 4 --eval-iters 1 --max-position-embeddings 48 "
      "--seq-length 48 " +
      flags);
  return proof_datasets(build_datasets(find_task(task, a), a, *make_tokenizer(a.tokenizer)), a);
}

std::vector<int64_t> counted(const Dataset& data, int64_t index) {
  const std::vector<float> weights = data.sample(index).get<float>("loss_mask");
  std::vector<int64_t> places;
  for (int64_t i = 0; i < kLength; ++i)
    if (weights[static_cast<size_t>(i)] != 0) places.push_back(i);
  return places;
}

TEST(ProofData, MasksWholeMicroBatchesAndAllButOnePart) {
  for (const char* task : {"gpt", "sft"}) {
    const std::shared_ptr<const Dataset> train = sets_of(task, "").train;
    int masked = 0, in_one_part = 0, as_they_were = 0;
    for (int64_t begin = 0; begin < 14 * kMicroBatch; begin += kMicroBatch) {
      const std::vector<int64_t> first = counted(*train, begin),
                                 second = counted(*train, begin + 1);
      masked += first.empty() && second.empty() ? 1 : 0;
      // Within two neighbouring of the 8 chunks that 4 context ranks have
      in_one_part += !first.empty() && first.back() - first.front() < kLength / 8 ? 1 : 0;
      as_they_were += first.size() + second.size() > kLength / 4 ? 1 : 0;
    }
    EXPECT_EQ(masked, 2) << task;
    EXPECT_EQ(in_one_part, 4) << task;
    EXPECT_GE(as_they_were, 6) << task;
  }
  const std::shared_ptr<const Dataset> train = sets_of("gpt", "").train;
  EXPECT_THAT(counted(*train, 6), testing::ElementsAre(45, 46, 47));
  EXPECT_THAT(counted(*train, 10), testing::ElementsAre(12, 13, 14));
  EXPECT_TRUE(counted(*train, 11).empty());  // of a micro-batch with tokens
}

TEST(ProofData, EndsDocumentsAroundTheBordersOfContextRanks) {
  const std::shared_ptr<const Dataset> train =
      sets_of("gpt", "--reset-position-ids --reset-attention-mask").train;
  std::set<int32_t> starts;
  for (int64_t i = 0; i < 42; ++i) {
    const Sample sample = train->sample(i);
    const std::vector<int64_t> positions = sample.get<int64_t>("position_ids");
    for (const int32_t start : sample.document_starts) {
      EXPECT_EQ(positions[static_cast<size_t>(start)], 0) << i;
      starts.insert(start);
    }
    EXPECT_EQ(std::ranges::count(positions, 0),
              static_cast<int64_t>(sample.document_starts.size()));
  }
  // 2, 3 and 4 context ranks have chunks of 12, 8 and 6 tokens
  for (const int32_t border : {12, 36, 8, 16, 32, 40, 6, 18, 30, 42})
    for (const int32_t start : {border - 1, border, border + 1})
      EXPECT_TRUE(starts.contains(start)) << start;
  EXPECT_EQ(sets_of("gpt", "").train->sample(0).document_starts, std::vector<int32_t>{0});
}

TEST(ProofData, EvaluatesSeveralSetsAndWholeOnes) {
  EXPECT_EQ(sets_of("gpt", "").valid.size(), 1);
  EXPECT_EQ(sets_of("gpt", "--multiple-validation-sets").valid.size(), 2);
  const TrainValidTestDatasets whole = sets_of("gpt", "--full-validation");
  EXPECT_EQ(whole.valid.front()->size() % kMicroBatch, 1);
  EXPECT_NE(whole.train->fingerprint(), whole.test->fingerprint());
}

}  // namespace
}  // namespace megatron
