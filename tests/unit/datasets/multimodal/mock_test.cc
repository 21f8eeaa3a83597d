// Made-up samples with a number of images of their own.
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/datasets/multimodal/mock_multimodal_dataset.h"
#include "megatron/datasets/tuning/sft_dataset.h"

namespace megatron {
namespace {

std::shared_ptr<const Dataset> mock_of(int64_t per_sample, int64_t tokens) {
  GPTDatasetConfig config;
  config.sequence_length = 64;
  config.tokenizer.vocab_size = 100;
  config.tokenizer.eod = 0;
  MockImages images;
  images.kinds = {{SampleImage{2, 2, 1, 12, {}, {}}, tokens}};
  images.token = 50;
  images.vocab_size = 100;
  images.per_sample = per_sample;
  return std::make_shared<const MockMultimodalDataset>(
      make_mock_sft_dataset(Split::kTrain, 48, config), images);
}

std::vector<size_t> counts_of(const Dataset& dataset) {
  std::vector<size_t> out;
  for (int64_t i = 0; i < dataset.size(); ++i) out.push_back(dataset.images(i).size());
  return out;
}

TEST(MockMultimodal, SamplesHaveNoImageOrOneOrTwo) {
  const std::vector<size_t> counts = counts_of(*mock_of(0, 4));
  for (const size_t count : {0, 1, 2}) EXPECT_GT(std::ranges::count(counts, count), 0) << count;
  EXPECT_LE(std::ranges::max(counts), size_t{2});
}

TEST(MockMultimodal, SamplesHaveAsManyImagesAsAreAskedForOrHaveRoom) {
  for (const size_t count : counts_of(*mock_of(5, 4))) EXPECT_EQ(count, size_t{5});
  for (const size_t count : counts_of(*mock_of(5, 16))) EXPECT_EQ(count, size_t{3});  // 63 tokens
}

}  // namespace
}  // namespace megatron
