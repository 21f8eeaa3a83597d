#include "megatron/tensor/gemm.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

class Gemm : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  double tolerance() const {
    if (GetParam() == at::kDouble) return 1e-13;
    return GetParam() == at::kFloat ? 1e-6 : 1e-2;
  }
};

TEST_P(Gemm, ForwardAndInputGradient) {
  const at::Tensor x = draw({5, 3, 17}, GetParam()), w = draw({29, 17}, GetParam(), 2),
                   b = draw({29}, GetParam(), 3);
  const at::Tensor wide = at::matmul(x.to(at::kDouble), w.to(at::kDouble).t());
  EXPECT_LT(relative_error(linear_forward(x, w, {}), wide), tolerance());
  EXPECT_LT(relative_error(linear_forward(x, w, b), wide + b.to(at::kDouble)), tolerance());
  const at::Tensor dy = draw({5, 3, 29}, GetParam(), 4);
  EXPECT_LT(
      relative_error(linear_input_grad(dy, w), at::matmul(dy.to(at::kDouble), w.to(at::kDouble))),
      tolerance());
  EXPECT_EQ(linear_forward(x, w, b).scalar_type(), GetParam());
  const at::Tensor addend = draw({5, 3, 29}, GetParam(), 5);
  EXPECT_LT(relative_error(linear_forward(x, w, b, addend),
                           wide + b.to(at::kDouble) + addend.to(at::kDouble)),
            tolerance());
}

TEST_P(Gemm, WeightGradientAccumulatesInTheTarget) {
  const at::Tensor x = draw({130, 3, 7}, GetParam()), dy = draw({130, 3, 5}, GetParam(), 2);
  const at::ScalarType wide = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor product =
      at::matmul(dy.to(at::kDouble).reshape({-1, 5}).t(), x.to(at::kDouble).reshape({-1, 7}));
  const at::Tensor start = draw({5, 7}, wide, 3);
  const double exact = wide == at::kDouble ? 1e-13 : 1e-6;
  at::Tensor target = start.clone();
  linear_weight_grad(dy, x, target, 1.0);
  EXPECT_LT(relative_error(target, start.to(at::kDouble) + product), exact);
  target.fill_(std::numeric_limits<float>::quiet_NaN());
  linear_weight_grad(dy, x, target, 0.0);
  EXPECT_LT(relative_error(target, product), exact) << "beta = 0 must not read the target";
}

TEST_P(Gemm, BiasGradientSumsAllRows) {
  const at::Tensor dy = draw({129, 2, 37}, GetParam());
  const at::ScalarType wide = GetParam() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor target = at::ones({37}, wide);
  bias_grad(dy, target, 2.0);
  EXPECT_LT(relative_error(target, dy.to(at::kDouble).sum(at::IntArrayRef{0, 1}) + 2),
            wide == at::kDouble ? 1e-13 : 1e-6);
  target.fill_(std::numeric_limits<float>::infinity());
  bias_grad(dy, target, 0.0);
  EXPECT_TRUE(target.isfinite().all().item<bool>());
}

// What is decoded in one step, by weights that are large.
TEST_P(Gemm, ARowDoesNotDependOnTheFewBesideIt) {
  const at::Tensor x = draw({17, 683}, GetParam()), w = draw({771, 683}, GetParam(), 2),
                   b = draw({771}, GetParam(), 3);
  const at::Tensor wide = at::matmul(x.to(at::kDouble), w.to(at::kDouble).t());
  const at::Tensor all = linear_forward(x.narrow(0, 0, 16), w, {});
  const bool exact = GetParam() == at::kDouble || GetParam() == at::kFloat;
  for (const int64_t rows : {1, 2, 3, 7, 16, 17}) {
    const at::Tensor some = x.narrow(0, 0, rows), expected = wide.narrow(0, 0, rows);
    const at::Tensor got = linear_forward(some, w, {});
    EXPECT_LT(relative_error(got, expected), tolerance()) << rows;
    EXPECT_LT(relative_error(linear_forward(some, w, b), expected + b.to(at::kDouble)), tolerance())
        << rows;
    if (exact && rows < 17) {
      EXPECT_TRUE(at::equal(got, all.narrow(0, 0, rows))) << rows;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Gemm,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(GemmErrors, ShapesAreNamed) {
  EXPECT_THROW(linear_forward(draw({2, 3}), draw({4, 5}), {}), InternalError);
  EXPECT_THROW(linear_weight_grad(draw({2, 3}), draw({2, 5}), draw({5, 3}), 1.0), InternalError);
}

TEST(GemmDeterminism, BiasGradientDoesNotDependOnThreads) {
  const at::Tensor dy = draw({1000, 33}, at::kFloat);
  at::Tensor one = at::zeros({33}), two = at::zeros({33});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  bias_grad(dy, one, 1.0);
  at::set_num_threads(3);
  bias_grad(dy, two, 1.0);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, two));
}

TEST(GemmChoices, NumbersOfRowsShareChoicesFourInAnOctave) {
  EXPECT_EQ(rows_of_choice(1), 1);
  EXPECT_EQ(rows_of_choice(3), 4);
  EXPECT_EQ(rows_of_choice(65), 80);
  EXPECT_EQ(rows_of_choice(4616), 5120);
  EXPECT_EQ(rows_of_choice(4608), 5120);
  int64_t choices = 0;
  for (int64_t rows = 1; rows <= 2048; ++rows) {
    const int64_t choice = rows_of_choice(rows);
    EXPECT_GE(choice, rows);
    EXPECT_LE(choice, std::max(2 * rows, rows + 8));
    EXPECT_EQ(rows_of_choice(choice), choice);
    choices += choice == rows ? 1 : 0;
  }
  EXPECT_EQ(choices, 31);  // 1, 2, 4, 8, then 8 apart up to 64, 16 to 128, and so on
}

}  // namespace
}  // namespace megatron
