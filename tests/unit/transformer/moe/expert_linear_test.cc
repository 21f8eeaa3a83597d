// What the linears of experts keep and measure with FP8 operands; their products are tested in
// tests/unit/tensor/grouped_quantization_test.cc.
#include "megatron/transformer/moe/expert_linear.h"

#include <gtest/gtest.h>

#include "megatron/tensor/experts/weighted_activation.h"
#include "megatron/tensor/torch.h"

namespace megatron::expert_linear {
namespace {

constexpr int64_t kExperts = 3, kN = 32, kK = 16;
enum Role { kInput, kWeight, kGradient };

// Delayed scales of three experts, of which the second gets no rows.
class Linear : public ParameterStore {
 public:
  explicit Linear(QuantizationRecipe recipe, bool weight_gradient = true, bool trainable = true,
                  bool versioned = true)
      : versioned_(versioned) {
    at::manual_seed(1);
    weight.name = "experts.linear_fc1.weight";
    weight.trainable = trainable;
    weight.store = this;
    weight.value = at::randn({kExperts, kN, kK}).to(at::kBFloat16);
    QuantizationOptions options;
    options.recipe = recipe;
    options.hybrid = true;
    options.weight_gradient = weight_gradient;
    linear.emplace(weight, options);
    scales.state = at::zeros({kExperts, 3, 2});
    scales.amax = at::zeros({kExperts, 3});
    x = at::randn({12, kK}).to(at::kBFloat16);
    dy = at::randn({12, kN}).to(at::kBFloat16);
    counts.rows = at::tensor({8, 0, 4}, at::kInt);
  }
  at::Tensor acquire(Parameter& parameter) override { return parameter.value; }
  void release(Parameter&) override {}
  GradTarget grad_target(Parameter&) override { return {}; }
  void grad_ready(Parameter&) override {}
  int64_t values_version() const override { return versioned_ ? version : -1; }
  const DelayedScales* delayed_scales(const Parameter& parameter) override {
    return parameter.delayed_scaling ? &scales : nullptr;
  }

  at::Tensor forward() const { return linear->forward(linear->input(x, counts), value(), counts); }
  // dx and dW
  std::pair<at::Tensor, at::Tensor> backward() const {
    const ExpertOperand gradient = linear->gradient(dy, counts);
    const at::Tensor dx = linear->input_grad(gradient, value(), counts);
    const ExpertOperand input = linear->saved_input({x, {}}, counts);
    const at::Tensor dw = at::zeros({kExperts, kN, kK});
    if (weight.trainable) linear->weight_grad(gradient, input, counts.rows, {dw, 0.0});
    return {dx, dw};
  }
  at::Tensor value() const { return weight.value; }
  float amax(int64_t expert, Role role) const { return scales.amax[expert][role].item<float>(); }
  float largest(const at::Tensor& rows, int64_t first, int64_t count) const {
    return rows.narrow(0, first, count).abs().max().item<float>();
  }

  Parameter weight;
  std::optional<ExpertLinear> linear;
  DelayedScales scales;
  at::Tensor x, dy;
  ExpertCounts counts;
  int64_t version = 0;

 private:
  const bool versioned_;
};

double distance(const at::Tensor& a, const at::Tensor& b) {
  return at::linalg_vector_norm(a.to(at::kDouble) - b.to(at::kDouble), 2).item<double>() /
         at::linalg_vector_norm(b.to(at::kDouble), 2).item<double>();
}

// Evaluation and recomputed forwards leave no trace; the backward records all three, however the
// weight gradient is computed.
TEST(ExpertLinears, TheBackwardMeasures) {
  for (int variant = 0; variant < 4; ++variant) {
    const Linear linear(QuantizationRecipe::kDelayed, /*weight_gradient=*/variant != 1,
                        /*trainable=*/variant != 2, /*versioned=*/variant != 3);
    linear.forward();
    EXPECT_EQ(linear.scales.amax.abs().max().item<float>(), 0.0f) << variant;
    linear.forward();
    linear.backward();
    EXPECT_EQ(linear.amax(0, kInput), linear.largest(linear.x, 0, 8)) << variant;
    EXPECT_EQ(linear.amax(2, kInput), linear.largest(linear.x, 8, 4)) << variant;
    EXPECT_EQ(linear.amax(2, kGradient), linear.largest(linear.dy, 8, 4)) << variant;
    EXPECT_EQ(linear.amax(1, kWeight), linear.value()[1].abs().max().item<float>()) << variant;
    EXPECT_EQ(linear.amax(1, kInput), 0.0f) << variant;
    EXPECT_EQ(linear.amax(1, kGradient), 0.0f) << variant;
  }
}

// A weight is quantised when its value has changed, and measured once for each value.
TEST(ExpertLinears, WeightsAreQuantisedOnce) {
  Linear linear(QuantizationRecipe::kDelayed);
  const at::Tensor y = linear.forward();
  linear.weight.value.mul_(2);
  EXPECT_TRUE(at::equal(linear.forward(), y)) << "the same version";
  ++linear.version;
  EXPECT_FALSE(at::equal(linear.forward(), y));
  linear.backward();
  linear.scales.amax.zero_();
  linear.backward();
  EXPECT_EQ(linear.amax(0, kWeight), 0.0f) << "recorded before";
}

TEST(ExpertLinears, ResultsAreNearThoseOfBf16) {
  const Linear plain(QuantizationRecipe::kNone);
  for (const bool weight_gradient : {true, false}) {
    const Linear linear(QuantizationRecipe::kTensorwise, weight_gradient);
    EXPECT_LT(distance(linear.forward(), plain.forward()), 0.05);
    EXPECT_GT(distance(linear.forward(), plain.forward()), 1e-3);
    const auto [dx, dw] = linear.backward();
    const auto [plain_dx, plain_dw] = plain.backward();
    EXPECT_LT(distance(dx, plain_dx), 0.1);
    EXPECT_GT(distance(dx, plain_dx), 1e-3);
    const double error = distance(dw, plain_dw);
    if (weight_gradient) {
      EXPECT_LT(error, 0.1);
      EXPECT_GT(error, 1e-3);
    } else {
      EXPECT_EQ(error, 0.0) << "--no-fp8-wgrad";
    }
    EXPECT_EQ(dw[1].abs().max().item<float>(), 0.0f);
  }
}

// The input is an activation, quantised once for both of its products: the numbers and records of
// the linear that gets it in the model's type.
TEST(ExpertLinears, ActivationsAreQuantisedInTheForward) {
  for (const QuantizationRecipe recipe :
       {QuantizationRecipe::kDelayed, QuantizationRecipe::kTensorwise}) {
    const Linear ours(recipe), other(recipe);
    const at::Tensor u = at::randn({12, 2 * kK}).to(at::kBFloat16), weights = at::rand({12}) + 0.5;
    const at::Tensor activation = weighted_activation(u, weights, {});
    const ExpertOperand input = ours.linear->activated_input(u, weights, {}, ours.counts);
    EXPECT_EQ(ours.scales.amax.abs().max().item<float>(), 0.0f) << "recorded by the forward";
    const auto forward = [](const Linear& linear, const ExpertOperand& x) {
      return linear.linear->forward(x, linear.value(), linear.counts);
    };
    EXPECT_TRUE(at::equal(forward(ours, input),
                          forward(other, other.linear->input(activation, other.counts))));
    const auto weight_grad = [](const Linear& linear, const ExpertOperand& x) {
      const at::Tensor dw = at::zeros({kExperts, kN, kK});
      const ExpertOperand gradient = linear.linear->gradient(linear.dy, linear.counts);
      linear.linear->weight_grad(gradient, linear.linear->saved_input(x, linear.counts),
                                 linear.counts.rows, {dw, 0.0});
      return dw;
    };
    EXPECT_TRUE(at::equal(weight_grad(ours, input), weight_grad(other, {activation, {}})));
    EXPECT_TRUE(at::equal(ours.scales.amax, other.scales.amax));
    const float recorded = ours.amax(0, kInput);
    EXPECT_EQ(recorded,
              recipe == QuantizationRecipe::kDelayed ? ours.largest(activation, 0, 8) : 0);
  }
}

}  // namespace
}  // namespace megatron::expert_linear
