// Images whose tokens attend to one another in both directions: their mask, and the blocks that a
// kernel takes in its place.
#include "megatron/models/mimo/image_blocks.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// With a window of 3 these are the rows of transformers for two images among text: 1, 11111, ...
TEST(HfVisionModels, ImagesAreSeenInBothDirections) {
  const at::Tensor tokens = at::tensor({0, 7, 7, 7, 7, 0, 7, 7, 0}, at::kLong).unsqueeze(0);
  const auto rows = [&](const at::Tensor& documents, int64_t window) {
    const at::Tensor mask = image_block_mask(tokens, 7, documents)[0][0];
    std::vector<std::string> out;
    for (int64_t i = 0; i < 9; ++i) {
      std::string row;
      for (int64_t j = 0; j < 9; ++j) row += !mask[i][j].item<bool>() && j > i - window ? '1' : '.';
      out.push_back(row);
    }
    return out;
  };
  EXPECT_EQ(rows({}, 3), (std::vector<std::string>{"1........", "11111....", "11111....",
                                                   ".1111....", "..111....", "...111...",
                                                   "....1111.", ".....111.", "......111"}));
  // Two documents, whose border lies in the first image.
  EXPECT_EQ(
      rows(at::tensor({0, 0, 0, 1, 1, 1, 1, 1, 1}, at::kLong).unsqueeze(0), 9),
      (std::vector<std::string>{"1........", "111......", "111......", "...11....", "...11....",
                                "...111...", "...11111.", "...11111.", "...111111"}));
}

// What the kernel of blocks adds to causal attention is what the mask shows of later keys.
TEST(HfVisionModels, BlocksOfImagesAreTheLaterKeysOfTheMask) {
  const at::Tensor tokens =
      at::tensor({7, 7, 0, 7, 7, 7, 7, 0, 7, 0, 7, 0, 0, 0, 0, 7, 7, 7}, at::kLong).view({2, 9});
  const TokenBlocks blocks =
      image_blocks({tokens.const_data_ptr<int64_t>(), 18}, 2, /*image_token=*/7);
  EXPECT_EQ(blocks.ranges.most, 64);
  ASSERT_EQ(blocks.ranges.counts.numel(), 4);               // of three blocks
  at::Tensor seen = at::ones({18, 18}, at::kBool).tril_();  // by row t b + i
  for (int64_t query = 0; query < 18; ++query)
    for (int64_t key = 0; key < 18; ++key)
      if (query % 2 != key % 2) seen[query][key].fill_(false);
  for (int64_t block = 0; block < 4; ++block) {
    const auto first = blocks.ranges.offsets[block].item<int64_t>(),
               count = blocks.ranges.counts[block].item<int64_t>();
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_EQ(blocks.places[first + i].item<int64_t>(), 64 * block + i);
      for (int64_t j = 0; j <= i; ++j) {
        const auto query = blocks.queries[first + i].item<int64_t>(),
                   key = blocks.keys[first + j].item<int64_t>();
        EXPECT_FALSE(seen[query][key].item<bool>());
        seen[query][key].fill_(true);
      }
    }
  }
  // Positions 4 and 5 of the first sample are the first tokens of its second document.
  const std::vector<DocumentPlace> documents = {{0, 0, 4}, {0, 4, 5}, {1, 0, 9}};
  const TokenBlocks divided =
      image_blocks({tokens.const_data_ptr<int64_t>(), 18}, 2, /*image_token=*/7, documents);
  EXPECT_TRUE(divided.queries.equal(at::tensor({0, 10, 8, 15, 13}, at::kLong)));
  EXPECT_TRUE(divided.document_places.equal(at::tensor({0, 10, 9, 25, 24}, at::kLong)));
  const at::Tensor mask = image_block_mask(tokens, 7, {});
  for (int64_t sample = 0; sample < 2; ++sample)
    EXPECT_TRUE(
        seen.slice(0, sample, 18, 2).slice(1, sample, 18, 2).equal(mask[sample][0].logical_not()))
        << sample;
}

}  // namespace
}  // namespace megatron
