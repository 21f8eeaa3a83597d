// What decoding keeps of earlier positions: states of all layers of a model.
#include "megatron/transformer/layer/layer_state.h"

#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {
namespace {

// A layer whose state is one number, and one that has none.
class Counter final : public LayerState {
 public:
  void clear() override { count = 0; }
  int64_t bytes() const override { return 8; }
  int64_t count = 0;
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
  EXPECT_EQ(state.bytes(), 16);
  a->count = b->count = 3;
  state.clear();
  EXPECT_EQ(a->count + b->count, 0);
}

}  // namespace
}  // namespace megatron
