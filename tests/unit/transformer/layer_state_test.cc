// What decoding keeps of earlier positions: states of all layers of a model.
#include "megatron/transformer/layer/layer_state.h"

#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {
namespace {

// A layer with two numbers per sequence and one per position, and one that keeps none.
class Counter final : public LayerState {
 public:
  std::vector<PagedBuffer*> paged() override { return {&positions}; }
  std::vector<SlotBuffer*> slots() override { return {&counts}; }
  PagedBuffer positions;
  SlotBuffer counts;
};
class Counting final : public Layer {
 public:
  using Layer::Layer;
  at::Tensor forward(const at::Tensor& x, const LayerContext& /*context*/) override { return x; }
  std::unique_ptr<LayerState> make_state() const override { return std::make_unique<Counter>(); }
};
class Stateless final : public Layer {
 public:
  using Layer::Layer;
  at::Tensor forward(const at::Tensor& x, const LayerContext& /*context*/) override { return x; }
};

TEST(DecodingState, EachLayerHasItsOwn) {
  const Counting first(1), third(3);
  const Stateless second(2);
  DecodingState state;
  EXPECT_EQ(state.bytes(), 0) << "made when first asked for";
  EXPECT_EQ(state.of(second), nullptr);
  auto* a = dynamic_cast<Counter*>(state.of(first));
  auto* b = dynamic_cast<Counter*>(state.of(third));
  ASSERT_TRUE(a != nullptr && b != nullptr && a != b);
  EXPECT_EQ(state.of(first), a) << "made once";
  EXPECT_EQ(a->counts.rows(3, {2}, at::kFloat).sizes(), (std::vector<int64_t>{3, 2}));
  b->positions.write(PagedRows({{0, 2, {1}}}, 4, 2, at::kCPU), at::zeros({2, 1, 1}));
  EXPECT_EQ(state.bytes(), 3 * 2 * 4 + 4 * 2 * 4);
  std::vector<StateBuffer*> found;
  state.for_each([&](StateBuffer& buffer) { found.push_back(&buffer); });
  EXPECT_EQ(found,
            (std::vector<StateBuffer*>{&a->positions, &b->positions, &a->counts, &b->counts}));
  state.clear();
  EXPECT_EQ(state.bytes(), 0);
}

}  // namespace
}  // namespace megatron
