#include "megatron/tensor/random.h"

#include <cmath>

#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

TokenPositions make_place(int64_t first_sample, int64_t b, int64_t first_position, int64_t s) {
  return {at::arange(first_sample, first_sample + b, at::kLong),
          at::arange(first_position, first_position + s, at::kLong)};
}

TEST(RandomKey, DependsOnEveryPart) {
  const uint64_t base = random_key(1, "hidden", 2).value;
  EXPECT_EQ(base, random_key(1, "hidden", 2).value);
  EXPECT_NE(base, random_key(2, "hidden", 2).value);
  EXPECT_NE(base, random_key(1, "hidde", 2).value);
  EXPECT_NE(base, random_key(1, "hidden", 3).value);
}

TEST(Dropout, DoesNotDependOnHowTheBatchIsCut) {
  const RandomKey key = random_key(7, "hidden", 1);
  const at::Tensor x = draw({6, 4, 37}, at::kFloat);
  const at::Tensor whole = dropout(x, 0.3, key, make_place(10, 4, 5, 6));
  const at::Tensor right = dropout(x.narrow(1, 2, 2), 0.3, key, make_place(12, 2, 5, 6));
  const at::Tensor lower = dropout(x.narrow(0, 4, 2), 0.3, key, make_place(10, 4, 9, 2));
  EXPECT_TRUE(at::equal(whole.narrow(1, 2, 2), right));
  EXPECT_TRUE(at::equal(whole.narrow(0, 4, 2), lower));
  EXPECT_FALSE(
      at::equal(whole, dropout(x, 0.3, random_key(7, "hidden", 2), make_place(10, 4, 5, 6))));
}

TEST(Dropout, RowsMayHaveSamplesOfTheirOwn) {
  const RandomKey key = random_key(7, "hidden", 1);
  const at::Tensor x = draw({6, 4, 37}, at::kFloat);
  const at::Tensor whole = dropout(x, 0.3, key, make_place(10, 4, 5, 6));
  // Positions 5 and 7 of sample 12, then position 6 of sample 10.
  const at::Tensor rows = at::stack({x[0][2], x[2][2], x[1][0]}).unsqueeze(1);
  const TokenPositions place = {at::tensor({12, 12, 10}, at::kLong),
                                at::tensor({5, 7, 6}, at::kLong)};
  const at::Tensor expected = at::stack({whole[0][2], whole[2][2], whole[1][0]}).unsqueeze(1);
  EXPECT_TRUE(at::equal(dropout(rows, 0.3, key, place), expected));
}

TEST(Dropout, DoesNotDependOnThreads) {
  const RandomKey key = random_key(7, "hidden", 1);
  const at::Tensor x = draw({64, 4, 640}, at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = dropout(x, 0.1, key, make_place(0, 4, 0, 64));
  at::set_num_threads(4);
  const at::Tensor four = dropout(x, 0.1, key, make_place(0, 4, 0, 64));
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, four));
}

TEST(Dropout, KeepsTheExpectedShareAndScale) {
  const at::Tensor kept =
      dropout(at::ones({64, 8, 512}), 0.25, random_key(3, "x"), make_place(0, 8, 0, 64));
  const double share = kept.ne(0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(share, 0.75, 5 * std::sqrt(0.25 * 0.75 / (64 * 8 * 512)));
  EXPECT_TRUE(kept.eq(0).logical_or(kept.eq(static_cast<float>(1.0 / 0.75))).all().item<bool>());
}

TEST(Dropout, GradientsAreMaskedAlike) {
  const TokenPositions place = make_place(3, 2, 0, 5);
  at::Tensor x = draw({5, 2, 33}).requires_grad_(),
             r = draw({5, 2, 33}, at::kDouble, 2).requires_grad_();
  const at::Tensor mask = dropout(at::ones_like(x).detach(), 0.4, random_key(1, "d"), place);
  const at::Tensor y = dropout_add(x, r, 0.4, random_key(1, "d"), place);
  EXPECT_LT(relative_error(y, x * mask + r), 1e-14);
  const at::Tensor dy = draw({5, 2, 33}, at::kDouble, 3);
  y.backward(dy);
  EXPECT_LT(relative_error(x.grad(), dy * mask), 1e-14);
  EXPECT_TRUE(at::equal(r.grad(), dy));
}

TEST(Dropout, SumsInTheResidualsType) {
  const TokenPositions place = make_place(0, 2, 0, 5);
  at::Tensor x = draw({5, 2, 8}, at::kBFloat16).requires_grad_(),
             r = draw({5, 2, 8}, at::kFloat, 2).requires_grad_();
  const at::Tensor y = dropout_add(x, r, 0.5, random_key(1, "d"), place);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(dropout_add(x, r, 0.0, random_key(1, "d"), place).scalar_type(), at::kFloat);
}

TEST(AttentionDropout, DependsOnPlaceOnly) {
  const RandomKey key = random_key(5, "attention", 3);
  const TokenPositions all = make_place(8, 3, 0, 16);
  const at::Tensor whole = attention_dropout_mask(6, 0, 0.2, key, all, all.position);
  const TokenPositions part = make_place(9, 2, 4, 5);
  const at::Tensor keys = at::tensor({12, 3, 4, 5, 15, 0}, at::kLong);
  const at::Tensor cut = attention_dropout_mask(2, 3, 0.2, key, part, keys);
  EXPECT_TRUE(
      at::equal(cut, whole.narrow(0, 1, 2).narrow(1, 3, 2).narrow(2, 4, 5).index_select(3, keys)));
  EXPECT_NEAR(whole.ne(0).to(at::kDouble).mean().item<double>(), 0.8, 0.03);
}

TEST(Normal, ShardsAreSlicesOfTheWhole) {
  const RandomKey key = random_key(1234, "init", 4);
  at::Tensor whole = at::empty({24, 70}), rows = at::empty({7, 70}), columns = at::empty({24, 33});
  normal_(whole, 0.02, key, 0, 70, 0);
  normal_(rows, 0.02, key, 5, 70, 0);
  normal_(columns, 0.02, key, 0, 70, 35);
  EXPECT_TRUE(at::equal(whole.narrow(0, 5, 7), rows));
  EXPECT_TRUE(at::equal(whole.narrow(1, 35, 33), columns));
  at::Tensor bf16 = at::empty({24, 70}, at::kBFloat16);
  normal_(bf16, 0.02, key, 0, 70, 0);
  EXPECT_TRUE(at::equal(whole.to(at::kBFloat16), bf16));
  at::Tensor fp64 = at::empty({24, 70}, at::kDouble);
  normal_(fp64, 0.02, key, 0, 70, 0);
  EXPECT_LT(relative_error(whole / 0.02, fp64 / 0.02), 1e-6);
}

// Kolmogorov-Smirnov statistic against a law, times sqrt(n); above 1.95 has probability 1e-3.
double ks_statistic(const at::Tensor& draws,
                    const std::function<at::Tensor(const at::Tensor&)>& law) {
  const auto [sorted, order] = draws.flatten().to(at::kDouble).sort();
  const int64_t n = sorted.numel();
  const at::Tensor steps = at::arange(1, n + 1, at::kDouble) / n;
  return (law(sorted) - steps).abs().max().item<double>() * std::sqrt(n);
}

TEST(Normal, HasTheLaw) {
  at::Tensor out = at::empty({1000, 1001});
  normal_(out, 2.0, random_key(1, "law"), 0, 1001, 0);
  const at::Tensor z = out.to(at::kDouble) / 2.0;
  EXPECT_NEAR(z.mean().item<double>(), 0.0, 0.004);
  EXPECT_NEAR(z.square().mean().item<double>(), 1.0, 0.006);
  EXPECT_NEAR(z.pow(4).mean().item<double>(), 3.0, 0.05);
  EXPECT_GT(z.abs().max().item<double>(), 4.5);
  EXPECT_LT(
      ks_statistic(z, [](const at::Tensor& x) { return 0.5 * (1 + at::erf(x / std::sqrt(2.0))); }),
      1.95);
  const at::Tensor flat = z.flatten();
  EXPECT_NEAR((flat.narrow(0, 0, 1000000) * flat.narrow(0, 1, 1000000)).mean().item<double>(), 0.0,
              0.005);
}

TEST(Uniform, HasTheLaw) {
  at::Tensor out = at::empty({999, 1001});
  uniform_(out, -1.0, 3.0, random_key(1, "law"), 0, 1001, 0);
  EXPECT_GE(out.min().item<float>(), -1.0f);
  EXPECT_LT(out.max().item<float>(), 3.0f);
  EXPECT_LT(ks_statistic(out, [](const at::Tensor& x) { return (x + 1) / 4; }), 1.95);
}

}  // namespace
}  // namespace megatron
