#include "megatron/training/batch.h"

#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A micro-batch of two samples of four tokens; the second one holds two documents.
std::shared_ptr<const MicroBatch> example_batch() {
  struct Owner {
    MicroBatch batch;
    std::vector<int64_t> tokens{1, 2, 3, 4, 5, 6, 7, 8}, labels{2, 3, 4, 5, 6, 7, 8, 9},
        positions{0, 1, 2, 3, 0, 1, 0, 1};
    std::vector<float> mask{1, 1, 0, 1, 1, 1, 1, 1};
  };
  auto owner = std::make_shared<Owner>();
  MicroBatch& b = owner->batch;
  b.micro_batch_size = 2;
  b.sequence_length = 4;
  b.tokens = owner->tokens.data();
  b.labels = owner->labels.data();
  b.position_ids = owner->positions.data();
  b.loss_mask = owner->mask.data();
  b.ordinals = {40, 41};
  b.document_starts = {{0}, {0, 2}};
  b.crosses_documents = false;
  return {owner, &owner->batch};
}

const ProcessGroup one;

TEST(Batch, TensorsShareTheHostMemoryAndKeepItAlive) {
  std::shared_ptr<const MicroBatch> source = example_batch();
  const int64_t* data = source->tokens;
  BatchMaker maker(c10::Device(c10::kCPU), /*own_positions=*/true, one);
  const Batch batch = maker.make(source);
  source.reset();
  EXPECT_EQ(batch.tokens.const_data_ptr<int64_t>(), data);
  EXPECT_EQ(batch.tokens[1][0].item<int64_t>(), 5);
  EXPECT_EQ(batch.labels[1][3].item<int64_t>(), 9);
  EXPECT_EQ(batch.loss_mask[0][2].item<float>(), 0);
  EXPECT_EQ(batch.position_ids[1][2].item<int64_t>(), 0);
  EXPECT_EQ(batch.place.sample[1].item<int64_t>(), 41);
  EXPECT_TRUE(at::equal(batch.place.position, at::arange(4)));
}

TEST(Batch, DocumentsAreNumberedWithinTheirSequence) {
  BatchMaker maker(c10::Device(c10::kCPU), false, one);
  const Batch batch = maker.make(example_batch());
  EXPECT_FALSE(batch.position_ids.defined());
  EXPECT_TRUE(
      at::equal(batch.document_ids, at::tensor({0, 0, 0, 0, 0, 0, 1, 1}, at::kLong).view({2, 4})));
}

}  // namespace
}  // namespace megatron
