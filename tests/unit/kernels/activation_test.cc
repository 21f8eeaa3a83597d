#include "megatron/kernels/activation.h"

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

struct Formula {
  Activation kind;
  bool gated;
  double offset;
  // Gated: of (x1, x2); else of x1 alone.
  double (*y)(double x1, double x2, double offset);
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

const Formula kFormulas[] = {
    {Activation::kGelu, false, 0,
     [](double x, double, double) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }},
    {Activation::kGeluTanh, false, 0, [](double x, double, double) { return gelu_tanh(x); }},
    {Activation::kRelu, false, 0, [](double x, double, double) { return x > 0 ? x : 0.0; }},
    {Activation::kSquaredRelu, false, 0,
     [](double x, double, double) { return x > 0 ? x * x : 0.0; }},
    {Activation::kSwiglu, true, 0, [](double x, double up, double) { return x * sigmoid(x) * up; }},
    {Activation::kGeglu, true, 0, [](double x, double up, double) { return gelu_tanh(x) * up; }},
    {Activation::kQuickGeglu, true, 1.0,
     [](double x, double up, double offset) { return x * sigmoid(1.702 * x) * (up + offset); }},
    {Activation::kExactGeglu, true, 0,
     [](double x, double up, double) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)) * up; }},
    {Activation::kQuickGelu, false, 0,
     [](double x, double, double) { return x * sigmoid(1.702 * x); }},
};

void test_activation(DType dtype, const Formula& formula, int64_t rows, int64_t features,
                     double scale) {
  const std::string what = "kind " + std::to_string(static_cast<int>(formula.kind));
  const int64_t width = formula.gated ? 2 * features : features;
  const Elements x(dtype, normal_values(rows * width, 1, scale)),
      dy(dtype, normal_values(rows * features, 2));
  Elements y(dtype, rows * features), dx(dtype, rows * width);
  ActivationArgs args;
  args.kind = formula.kind;
  args.dtype = dtype;
  args.rows = rows;
  args.features = features;
  args.offset = formula.offset;
  args.x = x.data();
  args.dy = dy.data();
  args.out = y.data();
  activation_forward_cpu(args, 0, 1);
  EXPECT_TRUE(std::isnan(y.values().back()));
  activation_forward_cpu(args, 1, rows);
  args.out = dx.data();
  activation_backward_cpu(args, 0, 1);
  EXPECT_TRUE(std::isnan(dx.values().back()));
  activation_backward_cpu(args, 1, rows);

  const Doubles in = x.values(), up = dy.values();
  Doubles expected_y(rows * features), expected_dx(rows * width);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < features; ++i) {
      const int64_t first = row * width + i, second = formula.gated ? first + features : first,
                    at = row * features + i;
      const auto f = [&](const Doubles& pair) {
        return formula.y(pair[0], pair[1], formula.offset);
      };
      expected_y[at] = f({in[first], in[second]});
      const Doubles slopes = differences({in[first], in[second]}, f);
      expected_dx[first] = up[at] * slopes[0];
      if (formula.gated) expected_dx[second] = up[at] * slopes[1];
    }
  }
  expect_near(y, expected_y, tolerance(dtype), what + " y");
  expect_near(dx, expected_dx, gradient_tolerance(dtype), what + " dx");
}

class ActivationKernels : public FloatingTypes {};

TEST_P(ActivationKernels, ForwardAndBackward) {
  for (const Formula& formula : kFormulas) {
    test_activation(GetParam(), formula, 3, 1, 2.0);
    test_activation(GetParam(), formula, 5, 37, 2.0);
    test_activation(GetParam(), formula, 2, 530, 2.0);  // longer than one run of the kernel
    test_activation(GetParam(), formula, 2, 64, 60.0);  // far into both tails
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ActivationKernels, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
