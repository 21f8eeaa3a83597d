// Rows in the order of experts, and the weighted activation, against plain operations.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/experts/weighted_activation.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

TEST(ExpertRows, AreOrderedByExpertThenToken) {
  // Five tokens of two choices; experts 2, 3 and 4 of six; -1 and 9 are none.
  const at::Tensor choices = at::tensor({3, 2, 2, 5, -1, 3, 0, 9, 2, 3}, at::kInt).view({5, 2});
  const ExpertOrder order = order_by_expert(choices, 2, 3);
  EXPECT_TRUE(at::equal(order.counts, at::tensor({3, 3, 0}, at::kInt)));
  EXPECT_TRUE(at::equal(order.choices.narrow(0, 0, 6), at::tensor({1, 2, 8, 0, 5, 9}, at::kLong)));
  EXPECT_TRUE(at::equal(order.rows,
                        at::tensor({3, 0, 1, -1, -1, 4, -1, -1, 2, 5}, at::kLong).view({5, 2})));
  EXPECT_EQ(order.choices.numel(), 10);
  for (const int64_t tokens : {0, 3}) {
    const ExpertOrder none = order_by_expert(at::full({tokens, 2}, -1, at::kInt), 0, 3);
    EXPECT_TRUE(at::equal(none.counts, at::zeros({3}, at::kInt)));
    EXPECT_TRUE(at::equal(none.rows, at::full({tokens, 2}, -1, at::kLong)));
  }
}

TEST(ExpertRows, TokensGoOnceToEachPart) {
  // Experts 0 and 1 are part 0, 2 and 3 part 1, 4 and 5 part 2; the last token goes nowhere.
  const at::Tensor choices =
      at::tensor({3, 2, 0, 5, 5, 4, 0, -1, 3, -1, -1, -1}, at::kInt).view({4, 3});
  const at::Tensor parts = parts_of_choices(choices, 3, 2);
  EXPECT_TRUE(at::equal(
      parts, at::tensor({0, 1, -1, -1, -1, 2, 0, 1, -1, -1, -1, -1}, at::kInt).view({4, 3})));
  const ExpertOrder by_part = order_by_expert(parts, 0, 3), order = order_by_expert(choices, 0, 6);
  EXPECT_TRUE(at::equal(by_part.counts, at::tensor({2, 2, 1}, at::kInt)));
  // Rows by part: tokens 0 and 2, tokens 0 and 2, token 1. By expert: 0, 2, 0, 0, 2, 1, 1, 1.
  const at::Tensor rows = order.choices.narrow(0, 0, 8);
  const at::Tensor found =
      rows_in_parts(rows, choices, by_part.rows, at::tensor({0, 10, 20}, at::kLong), 2);
  EXPECT_TRUE(at::equal(found, at::tensor({0, 1, 12, 12, 13, 24, 24, 24}, at::kLong)));
  EXPECT_EQ(parts_of_choices(choices.narrow(0, 0, 0), 3, 2).numel(), 0);
}

TEST(ExpertRows, SumsTakeOneChoiceAfterTheOther) {
  // In fp32 the order matters: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1.
  at::Tensor rows = at::tensor({1e8F, 1.0F, -1e8F, NAN}).view({4, 1});
  const at::Tensor places =
      at::tensor({0, 1, 2, 0, 2, 1, -1, 1, -1, -1, -1, -1}, at::kLong).view({4, 3});
  at::Tensor sums = at::zeros({4, 1});
  add_rows(rows, places, sums);
  EXPECT_TRUE(at::equal(sums, at::tensor({0.0F, 1.0F, 1.0F, 0.0F}).view({4, 1})));
  add_rows(rows.narrow(0, 0, 0), at::full({4, 3}, -1, at::kLong), sums);
  EXPECT_TRUE(at::equal(sums, at::tensor({0.0F, 1.0F, 1.0F, 0.0F}).view({4, 1})));
  EXPECT_TRUE(at::equal(sum_rows(rows, places), sums));
  EXPECT_TRUE(at::equal(gather_rows(rows.squeeze(1), places.narrow(0, 2, 2)),
                        at::tensor({0.0F, 1.0F, 0.0F, 0.0F, 0.0F, 0.0F}).view({2, 3})));
}

TEST(ExpertRows, SpreadAsTheyAreGathered) {
  const ExpertOrder order =
      order_by_expert(at::tensor({2, 0, 0, 1, 1, 2}, at::kInt).view({3, 2}), 0, 3);
  for (const at::ScalarType type : {at::kDouble, at::kBFloat16, at::kByte}) {
    const at::Tensor x = (at::arange(21).view({3, 7}) + 1).to(type);
    EXPECT_TRUE(at::equal(spread_rows(x, order.rows), gather_rows(x, order.choices, 2)));
  }
  EXPECT_EQ(spread_rows(at::ones({0, 4}), at::ones({0, 2}, at::kLong)).numel(), 0);
}

TEST(ExpertRows, SumsOverTheRowsOfAnExpert) {
  const at::Tensor counts = at::tensor({2, 0, 3}, at::kInt);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  at::Tensor rows = draw({7, 4}), scales = draw({7}, at::kDouble, 2);
  rows.narrow(0, 5, 2).fill_(nan);  // of no expert
  EXPECT_TRUE(at::equal(experts_of_rows(counts, 7), at::tensor({0, 0, 2, 2, 2, 2, 2}, at::kLong)));
  for (const bool scaled : {false, true}) {
    const at::Tensor in = scaled ? rows * scales.unsqueeze(1) : rows;
    const at::Tensor expected = at::stack(
        {in.narrow(0, 0, 2).sum(0), at::zeros({4}, at::kDouble), in.narrow(0, 2, 3).sum(0)});
    at::Tensor assigned = at::full({3, 4}, nan, at::kDouble), added = at::ones({3, 4}, at::kDouble);
    const at::Tensor factors = scaled ? scales : at::Tensor();
    sum_rows_of_experts(rows, counts, factors, assigned, 0.0);
    sum_rows_of_experts(rows, counts, factors, added, 1.0);
    EXPECT_LT(relative_error(assigned, expected), 1e-14);
    EXPECT_LT(relative_error(added, expected + 1.0), 1e-14);
  }
  at::Tensor empty = at::full({3, 4}, nan, at::kDouble);
  sum_rows_of_experts(rows.narrow(0, 0, 0), at::zeros({3}, at::kInt), {}, empty, 0.0);
  EXPECT_TRUE(at::equal(empty, at::zeros({3, 4}, at::kDouble)));
}

at::Tensor plain_activation(const at::Tensor& x, const ExpertActivation& activation) {
  if (activation.kind == Activation::kGelu) return at::gelu(x);
  if (activation.kind == Activation::kSquaredRelu) return at::relu(x).square();
  at::Tensor gate = x.chunk(2, -1)[0], up = x.chunk(2, -1)[1];
  if (activation.clamp) {
    gate = gate.clamp_max(*activation.clamp);
    up = up.clamp(-*activation.clamp, *activation.clamp);
  }
  if (activation.kind == Activation::kGeglu) return at::gelu(gate, "tanh") * up;
  if (activation.kind == Activation::kExactGeglu) return at::gelu(gate) * up;
  const double slope = activation.kind == Activation::kQuickGeglu ? 1.702 : 1.0;
  return gate * at::sigmoid(slope * gate) * (up + activation.offset);
}

TEST(WeightedActivation, EqualsAutograd) {
  const ExpertActivation all[] = {
      {Activation::kSwiglu},           {Activation::kGeglu},
      {Activation::kQuickGeglu, 1.0},  {Activation::kQuickGeglu, 1.0, 0.7},
      {Activation::kSwiglu, 0.0, 0.5}, {Activation::kGelu},
      {Activation::kSquaredRelu},      {Activation::kExactGeglu}};
  for (const ExpertActivation& activation : all) {
    const std::string what = "activation " + std::to_string(static_cast<int>(activation.kind));
    const int64_t f = 5, columns = is_gated(activation.kind) ? 2 * f : f;
    const at::Tensor x = draw({9, columns}).set_requires_grad(true),
                     weights = draw({9}, at::kDouble, 2).set_requires_grad(true),
                     dy = draw({9, f}, at::kDouble, 3);
    const at::Tensor y = plain_activation(x, activation) * weights.unsqueeze(1);
    torch::autograd::backward({y}, {dy});
    EXPECT_LT(relative_error(weighted_activation(x, weights, activation), y), 1e-14) << what;
    const auto grads =
        weighted_activation_backward(dy, x, weights, activation, {.y = true, .amax = true});
    EXPECT_LT(relative_error(grads.dx, x.grad()), 1e-13) << what;
    EXPECT_LT(relative_error(grads.dweights, weights.grad()), 1e-13) << what;
    EXPECT_LT(relative_error(grads.y, y), 1e-14) << what;
    EXPECT_FALSE(weighted_activation_backward(dy, x, weights, activation, {}).y.defined());
  }
}

// Of the rounded gradient, since a scale of FP8 follows from it.
TEST(WeightedActivation, LargestMagnitudesAreThoseOfTheResult) {
  for (const Activation kind : {Activation::kSwiglu, Activation::kGelu}) {
    const int64_t f = 1100, columns = is_gated(kind) ? 2 * f : f;
    const at::Tensor x = draw({7, columns}, at::kBFloat16), dy = draw({7, f}, at::kBFloat16, 3),
                     weights = draw({7}, at::kFloat, 2);
    const auto grads = weighted_activation_backward(dy, x, weights, {kind}, {.amax = true});
    EXPECT_TRUE(at::equal(grads.amax, grads.dx.to(at::kFloat).abs().amax(1)));
    EXPECT_FALSE(grads.y.defined());
    EXPECT_FALSE(weighted_activation_backward(dy, x, weights, {kind}, {}).amax.defined());
  }
}

// The clamped activation of gpt-oss: (gate, up) and its value, computed with NumPy.
TEST(WeightedActivation, ClampedGoldenValues) {
  const at::Tensor x = at::tensor({1.0, 0.5, 9.0, -9.0, -2.0, 1.0}, at::kDouble).view({3, 2});
  const at::Tensor y =
      weighted_activation(x, at::ones({3}, at::kDouble), {Activation::kQuickGeglu, 1.0, 7.0});
  const at::Tensor expected =
      at::tensor({1.268693649, -41.99971877, -0.128682752}, at::kDouble).view({3, 1});
  EXPECT_LT(relative_error(y, expected), 1e-9);
}

// The product with the weight is rounded once.
TEST(WeightedActivation, RoundsOnce) {
  const at::Tensor x = draw({64, 32}, at::kBFloat16), weights = draw({64}, at::kFloat, 2);
  const ExpertActivation activation{Activation::kSwiglu};
  const at::Tensor wide = weighted_activation(x.to(at::kFloat), weights, activation);
  EXPECT_TRUE(at::equal(weighted_activation(x, weights, activation), wide.to(at::kBFloat16)));
  EXPECT_EQ(weighted_activation(x.narrow(0, 0, 0), weights.narrow(0, 0, 0), activation).size(0), 0);
}

}  // namespace
}  // namespace megatron
