// Rows of device memory that are copied, swapped to the host and parked there.
#include "megatron/tensor/decoding/state_buffer.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor numbers(int64_t rows) { return at::arange(rows * 6, at::kFloat).view({rows, 3, 2}); }

TEST(StateBuffer, NewSlotsAreZeroAndOldOnesAreKept) {
  SlotBuffer buffer;
  EXPECT_EQ(buffer.bytes(), 0);
  buffer.rows(2, {3, 2}, at::kFloat).copy_(numbers(2));
  const at::Tensor more = buffer.rows(4, {3, 2}, at::kFloat);
  EXPECT_TRUE(at::equal(more.narrow(0, 0, 2), numbers(2)));
  EXPECT_TRUE(at::equal(more.narrow(0, 2, 2), at::zeros({2, 3, 2})));
  EXPECT_TRUE(buffer.rows(3, {3, 2}, at::kFloat).is_same(more)) << "memory is not reduced";
  EXPECT_EQ(buffer.bytes(), 4 * 6 * 4);
}

TEST(StateBuffer, CopiesLeadingEntriesOfARow) {
  SlotBuffer buffer;
  const at::Tensor held = buffer.rows(3, {3, 2}, at::kFloat).copy_(numbers(3));
  buffer.copy_row(2, 0, 2);
  at::Tensor expected = numbers(3);
  expected[0].narrow(0, 0, 2).copy_(numbers(3)[2].narrow(0, 0, 2));
  EXPECT_TRUE(at::equal(held, expected));
}

TEST(StateBuffer, SwappedRowsComeBackWhereverTheyGo) {
  SlotBuffer buffer;
  buffer.swap_out({{0}, {0}}, 2);  // nothing is held yet
  const at::Tensor held = buffer.rows(4, {3, 2}, at::kFloat).copy_(numbers(4));
  EXPECT_THROW(buffer.swap_in({{0}, {0}}), InternalError);
  buffer.swap_out({{3, 1}, {0, 1}}, 2);
  buffer.fill_with_nan({1, 3});
  EXPECT_TRUE(held[1].isnan().all().item<bool>());
  EXPECT_FALSE(held[0].isnan().any().item<bool>());
  buffer.swap_in({{0, 1}, {0, 3}});
  EXPECT_TRUE(at::equal(held[0], numbers(4)[3]));
  EXPECT_TRUE(at::equal(held[3], numbers(4)[1]));
  EXPECT_THROW(buffer.swap_out({{0, 1}, {0}}, 2), InternalError);
}

TEST(StateBuffer, ParksEverythingOnTheHost) {
  SlotBuffer buffer;
  buffer.offload(true);  // nothing is held
  buffer.reload();
  buffer.rows(2, {3, 2}, at::kFloat).copy_(numbers(2));
  buffer.swap_out({{1}, {0}}, 1);
  buffer.offload(true);
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_THROW(buffer.rows(2, {3, 2}, at::kFloat), InternalError);
  buffer.reload();
  EXPECT_TRUE(at::equal(buffer.data(), numbers(2)));
  buffer.swap_in({{0}, {0}});
  EXPECT_TRUE(at::equal(buffer.data()[0], numbers(2)[1])) << "swapped rows stay on the host";
  buffer.offload(false);
  EXPECT_EQ(buffer.bytes(), 0);
  buffer.reload();
  EXPECT_EQ(buffer.data().sizes(), numbers(2).sizes()) << "room for others";
  buffer.clear();
  EXPECT_EQ(buffer.bytes(), 0);
  EXPECT_EQ(buffer.rows(1, {1}, at::kFloat).numel(), 1) << "of another shape";
}

}  // namespace
}  // namespace megatron
