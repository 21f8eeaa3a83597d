// Causal convolution and SiLU: published vectors, torch's conv1d, borders of documents, slices.
#include "megatron/transformer/ssm/causal_conv.h"

#include <vector>

#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

// [s, C] of one sequence -> [s, 1, C]
at::Tensor one_sequence(const at::Tensor& x) { return x.unsqueeze(1); }

struct VectorCase {
  at::Tensor x = one_sequence(u(10, {6, 2})), w = u(11, {2, 4}).unsqueeze(1), bias = u(12, {2}),
             before = one_sequence(u(13, {3, 2})), dy = one_sequence(u(17, {6, 2}));
  at::Tensor runs = document_runs(ids({0, 0, 0, 1, 1, 1}));
};

TEST(CausalConv, Vectors) {
  const VectorCase v;
  expect_vector(causal_conv(v.x, v.w, v.bias, {.runs = v.runs}),
                {-0.0737639599986, -0.108334071854, -0.190089035863, -0.227211021583,
                 0.272865492838, -0.256580509479, 0.504236275326, -0.252941571212, 0.145179550601,
                 -0.0608219726686, -0.27572217254, 0.190652958657},
                "y");
  const ConvBorders borders{.before = v.before, .runs = v.runs};
  expect_vector(causal_conv(v.x, v.w, v.bias, borders),
                {-0.276667526929, 0.118597479328, -0.196806246793, -0.263477605251, 0.911394261932,
                 -0.163570833506, 0.504236275326, -0.252941571212, 0.145179550601, -0.0608219726686,
                 -0.27572217254, 0.190652958657},
                "y with rows before");
  const CausalConvGrads grads = causal_conv_backward(v.dy, v.x, v.w, v.bias, borders);
  expect_vector(grads.u,
                {-0.150664151943, -0.131764741314, 0.154964482077, 0.0328571344856, 0.144132261453,
                 -0.0146601799866, -0.508060931203, 0.632642855275, -0.217680182184, 0.207460689671,
                 0.0173197294702, -0.226735411881},
                "dx");
  expect_vector(grads.weight,
                {-0.0441025046194, -0.253978518337, -0.652227242463, -1.09461629379, 0.381511799499,
                 0.485694612932, -0.658054061095, -1.09289377182},
                "dw");
  expect_vector(grads.bias, {0.617761036984, -1.02313015937}, "db");
  expect_vector(grads.before,
                {0.00282089808285, 0.43169596006, -0.240560503381, 0.328168639785, -0.382619921449,
                 0.146208089183},
                "gradient of the rows before");
}

TEST(CausalConv, IsConv1dAndItsGradients) {
  for (const bool has_bias : {true, false}) {
    const at::Tensor x = u(1, {9, 2, 5}).set_requires_grad(true),
                     w = u(2, {5, 1, 3}).set_requires_grad(true), dy = u(4, {9, 2, 5});
    const at::Tensor bias = has_bias ? u(3, {5}).set_requires_grad(true) : at::Tensor();
    const at::Tensor padded = at::constant_pad_nd(x.permute({1, 2, 0}), {2, 0});
    const at::Tensor y =
        at::silu(at::conv1d(padded, w, bias, {1}, at::IntArrayRef({0}), {1}, /*groups=*/5))
            .permute({2, 0, 1});
    y.backward(dy);
    EXPECT_LT(largest(causal_conv(x, w, bias) - y), 1e-14);
    const CausalConvGrads grads = causal_conv_backward(dy, x, w, bias);
    EXPECT_LT(largest(grads.u - x.grad()), 1e-13);
    EXPECT_LT(largest(grads.weight - w.grad()), 1e-13);
    EXPECT_EQ(grads.bias.defined(), has_bias);
    if (has_bias) {
      EXPECT_LT(largest(grads.bias - bias.grad()), 1e-13);
    }
    EXPECT_FALSE(grads.before.defined());
  }
}

TEST(CausalConv, RunsTellDocumentsApartThatShareAnId) {
  EXPECT_TRUE(at::equal(document_runs(ids({3, 3, 5, 3, 3, 3})).view({-1}),
                        at::tensor({0, 0, 1, 2, 2, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(document_runs(ids({7})).view({-1}), at::tensor({0}, at::kLong)));
}

// Documents of every length, down to one token; the second sequence has other borders.
TEST(CausalConv, PackedDocumentsAreDocumentsAlone) {
  const std::vector<int64_t> first = {0, 0, 0, 1, 2, 2, 2, 2, 2, 0}, second(10, 4);
  const at::Tensor runs = document_runs(at::cat({ids(first), ids(second)}));
  const at::Tensor x = u(1, {10, 2, 3}), w = u(2, {3, 1, 4}), bias = u(3, {3}),
                   dy = u(4, {10, 2, 3});
  const at::Tensor y = causal_conv(x, w, bias, {.runs = runs});
  const CausalConvGrads grads = causal_conv_backward(dy, x, w, bias, {.runs = runs});
  at::Tensor dw = at::zeros_like(w);
  const auto compare = [&](int64_t sequence, int64_t begin, int64_t length) {
    const auto part = [&](const at::Tensor& t) {
      return t.narrow(0, begin, length).narrow(1, sequence, 1);
    };
    EXPECT_LT(largest(part(y) - causal_conv(part(x), w, bias)), 1e-15);
    const CausalConvGrads alone = causal_conv_backward(part(dy), part(x), w, bias);
    EXPECT_LT(largest(part(grads.u) - alone.u), 1e-15);
    dw += alone.weight;
  };
  compare(0, 0, 3);
  compare(0, 3, 1);
  compare(0, 4, 5);
  compare(0, 9, 1);
  compare(1, 0, 10);
  EXPECT_LT(largest(grads.weight - dw), 1e-13);
}

// A sequence in slices, some shorter than the rows that the convolution looks back.
TEST(CausalConv, SlicesAreOnePass) {
  const at::Tensor x = u(1, {11, 2, 3}), w = u(2, {3, 1, 4}), dy = u(4, {11, 2, 3});
  const at::Tensor runs = document_runs(
      at::cat({ids({0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2}), ids({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})}));
  const at::Tensor whole = causal_conv(x, w, {}, {.runs = runs});
  at::Tensor before, runs_before = at::full({3, 2}, -1, at::kLong);
  int64_t begin = 0;
  for (const int64_t length : {1, 2, 1, 4, 3}) {
    const at::Tensor part = x.narrow(0, begin, length), own = runs.narrow(0, begin, length);
    const at::Tensor y =
        causal_conv(part, w, {}, {.before = before, .runs = own, .runs_before = runs_before});
    EXPECT_LT(largest(y - whole.narrow(0, begin, length)), 1e-15) << begin;
    before = last_conv_rows(before, part, 4);
    runs_before = at::cat({runs_before, own}).narrow(0, length, 3);
    begin += length;
  }
  EXPECT_TRUE(at::equal(before, x.narrow(0, 8, 3)));
}

// Sums in fp32: a result is off by its own rounding, and weight gradients stay fp32.
TEST(CausalConv, SumsOfBf16AreFp32) {
  const at::Tensor x = u(1, {64, 2, 8}).to(at::kBFloat16), w = u(2, {8, 1, 4}).to(at::kBFloat16),
                   bias = u(3, {8}).to(at::kBFloat16), dy = u(4, {64, 2, 8}).to(at::kBFloat16);
  const auto exact = [](const at::Tensor& t) { return t.to(at::kDouble); };
  const at::Tensor y = causal_conv(x, w, bias),
                   expected = causal_conv(exact(x), exact(w), exact(bias));
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_LT(largest((exact(y) - expected) / expected), 1.0 / 256 + 1e-5);
  const CausalConvGrads grads = causal_conv_backward(dy, x, w, bias),
                        precise = causal_conv_backward(exact(dy), exact(x), exact(w), exact(bias));
  EXPECT_EQ(grads.weight.scalar_type(), at::kFloat);
  EXPECT_LT(largest(exact(grads.weight) - precise.weight), 1e-5);
  EXPECT_LT(largest(exact(grads.bias) - precise.bias), 1e-5);
}

}  // namespace
}  // namespace megatron
