// What decoding keeps of earlier positions: keys and values of a layer, states of all layers.
#include "megatron/transformer/layer/layer_state.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/kv_cache.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {
namespace {

TEST(KVCache, ReturnsEverythingSoFar) {
  KVCache cache(5);
  EXPECT_EQ(cache.bytes(), 0);
  const at::Tensor k = at::arange(5 * 2 * 1 * 3, at::kDouble).view({5, 2, 1, 3}), v = k + 100.0;
  int64_t done = 0;
  for (const int64_t count : {3, 1, 1}) {
    const auto [keys, values] =
        cache.append(done, k.narrow(0, done, count), v.narrow(0, done, count));
    done += count;
    EXPECT_TRUE(at::equal(keys, k.narrow(0, 0, done)));
    EXPECT_TRUE(at::equal(values, v.narrow(0, 0, done)));
  }
  EXPECT_EQ(cache.bytes(), 2 * 5 * 2 * 3 * 8);
  EXPECT_THROW(cache.append(5, k.narrow(0, 0, 1), v.narrow(0, 0, 1)), InternalError);
}

TEST(KVCache, GrowsAsPositionsCome) {
  const int64_t endless = int64_t{1} << 50;
  KVCache cache(endless);
  const at::Tensor k = at::arange(2000, at::kDouble).view({2000, 1, 1, 1});
  for (int64_t done = 0; done < 2000; done += 100) {
    const auto [keys, values] = cache.append(done, k.narrow(0, done, 100), -k.narrow(0, done, 100));
    ASSERT_TRUE(at::equal(keys, k.narrow(0, 0, done + 100))) << done;
    ASSERT_TRUE(at::equal(values, -k.narrow(0, 0, done + 100))) << done;
  }
}

// A layer whose state is one number per row, and one that has none.
class Counter final : public LayerState {
 public:
  explicit Counter(const DecodingShape& shape)
      : count(at::zeros({static_cast<int64_t>(shape.padding.size())})) {}
  void clear() override { count.zero_(); }
  void reorder(const at::Tensor& rows) override { count = count.index_select(0, rows); }
  int64_t bytes() const override { return static_cast<int64_t>(count.nbytes()); }
  at::Tensor count;
};
class Counting final : public Layer {
 public:
  using Layer::Layer;
  at::Tensor forward(const at::Tensor& x, const LayerContext& /*context*/) override { return x; }
  std::unique_ptr<LayerState> make_state(const DecodingShape& shape) const override {
    return std::make_unique<Counter>(shape);
  }
};
class Stateless final : public Layer {
 public:
  using Layer::Layer;
  at::Tensor forward(const at::Tensor& x, const LayerContext& /*context*/) override { return x; }
};

TEST(DecodingState, EachLayerHasItsOwn) {
  const Counting first(1), third(3);
  const Stateless second(2);
  DecodingState state({4, {2, 0}});
  EXPECT_EQ(state.of(second), nullptr);
  auto* a = dynamic_cast<Counter*>(state.of(first));
  auto* b = dynamic_cast<Counter*>(state.of(third));
  ASSERT_TRUE(a != nullptr && b != nullptr && a != b);
  EXPECT_EQ(state.of(first), a) << "made once";
  EXPECT_EQ(state.bytes(), 16);
  a->count = at::tensor({1.0f, 2.0f});
  state.reorder(at::tensor({1, 1, 0}, at::kLong));
  EXPECT_TRUE(at::equal(a->count, at::tensor({2.0f, 2.0f, 1.0f})));
  EXPECT_EQ(b->count.numel(), 3);
  EXPECT_TRUE(at::equal(state.padding_mask(2, at::kCPU).select(2, 1).flatten(),
                        at::tensor({0, 0, 0, 0, 1, 1}).to(at::kBool)));
  state.advance(3);
  state.clear();
  EXPECT_EQ(state.length(), 0);
  EXPECT_EQ(a->count.sum().item<float>(), 0.0f);
}

TEST(DecodingState, HidesLeftPadding) {
  DecodingState state({4, {2, 0}});
  const at::Tensor prompt = state.padding_mask(3, at::kCPU);
  ASSERT_EQ(prompt.sizes(), at::IntArrayRef({2, 1, 3, 3}));
  for (int64_t row = 0; row < 3; ++row)
    EXPECT_TRUE(at::equal(prompt.select(2, row).reshape({2, 3}),
                          at::tensor({1, 1, 0, 0, 0, 0}).to(at::kBool).view({2, 3})));
  state.advance(3);
  EXPECT_TRUE(at::equal(state.padding_mask(1, at::kCPU).reshape({2, 4}),
                        at::tensor({1, 1, 0, 0, 0, 0, 0, 0}).to(at::kBool).view({2, 4})));
  EXPECT_FALSE(DecodingState({4, {0, 0}}).padding_mask(3, at::kCPU).defined());
  state.advance(1);
  EXPECT_THROW(state.advance(1), InternalError);
}

}  // namespace
}  // namespace megatron
