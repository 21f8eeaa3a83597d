#include "megatron/tensor/experts/grouped_gemm.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

constexpr int64_t kN = 29, kK = 17, kBeyond = 4;

at::Tensor counts_of(const std::vector<int64_t>& rows, at::ScalarType type = at::kLong) {
  return at::tensor(rows, at::kLong).to(type);
}

class GroupedGemmOf : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  double tolerance() const {
    if (GetParam() == at::kDouble) return 1e-13;
    return GetParam() == at::kFloat ? 1e-6 : 1e-2;
  }
  at::ScalarType wide() const { return GetParam() == at::kDouble ? at::kDouble : at::kFloat; }
};

// Experts without rows at the start, in the middle and at the end; one expert; no rows at all.
const std::vector<std::vector<int64_t>> kLoads = {
    {0, 5, 0, 1, 40, 0}, {7}, {0}, {0, 0, 0}, {3, 3, 3, 3}};

TEST_P(GroupedGemmOf, EveryExpertMultipliesItsRows) {
  for (const std::vector<int64_t>& rows : kLoads) {
    const auto experts = static_cast<int64_t>(rows.size());
    const at::Tensor counts = counts_of(rows, rows.size() % 2 == 0 ? at::kInt : at::kLong);
    const int64_t sum = counts.sum().item<int64_t>(), all = sum + kBeyond;
    at::Tensor x = draw({all, kK}, GetParam()), dy = draw({all, kN}, GetParam(), 2);
    x.narrow(0, sum, kBeyond).fill_(std::nan(""));
    dy.narrow(0, sum, kBeyond).fill_(std::nan(""));
    const at::Tensor w = draw({experts, kN, kK}, GetParam(), 3);
    at::Tensor y = at::full({all, kN}, 5, w.options()), dx = at::full({all, kK}, 5, w.options());
    grouped_forward_into(x, w, counts, y);
    grouped_input_grad_into(dy, w, counts, dx);
    const at::Tensor start = draw({experts, kN, kK}, wide(), 4);
    at::Tensor added = start.clone(), assigned = at::full_like(start, std::nan(""));
    grouped_weight_grad(dy, x, counts, added, 1.0);
    grouped_weight_grad(dy, x, counts, assigned, 0.0);
    for (int64_t expert = 0, first = 0; expert < experts; first += rows[expert++]) {
      const at::Tensor x_e = x.narrow(0, first, rows[expert]).to(at::kDouble),
                       dy_e = dy.narrow(0, first, rows[expert]).to(at::kDouble),
                       w_e = w[expert].to(at::kDouble), dw_e = at::matmul(dy_e.t(), x_e);
      const std::string what = "expert " + std::to_string(expert);
      EXPECT_LT(relative_error(y.narrow(0, first, rows[expert]), at::matmul(x_e, w_e.t())),
                tolerance())
          << what;
      EXPECT_LT(relative_error(dx.narrow(0, first, rows[expert]), at::matmul(dy_e, w_e)),
                tolerance())
          << what;
      const double exact = wide() == at::kDouble ? 1e-13 : 1e-6;
      EXPECT_LT(relative_error(assigned[expert], dw_e), exact) << what;
      EXPECT_LT(relative_error(added[expert], start[expert].to(at::kDouble) + dw_e), exact) << what;
      if (rows[expert] == 0) {
        EXPECT_TRUE(at::equal(added[expert], start[expert])) << what;
        EXPECT_EQ(assigned[expert].abs().max().item<double>(), 0.0) << what;
      }
    }
    EXPECT_TRUE((y.narrow(0, sum, kBeyond) == 5).all().item<bool>()) << "rows behind the sum";
    EXPECT_TRUE((dx.narrow(0, sum, kBeyond) == 5).all().item<bool>()) << "rows behind the sum";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GroupedGemmOf,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(GroupedGemm, OperandsWithoutRows) {
  const at::Tensor x = at::empty({0, kK}), dy = at::empty({0, kN}),
                   w = draw({2, kN, kK}, at::kFloat);
  const at::Tensor counts = counts_of({0, 0});
  at::Tensor y = at::empty({0, kN}), dx = at::empty({0, kK});
  grouped_forward_into(x, w, counts, y);
  grouped_input_grad_into(dy, w, counts, dx);
  at::Tensor target = at::full({2, kN, kK}, std::nan(""));
  grouped_weight_grad(dy, x, counts, target, 0.0);
  EXPECT_TRUE((target == 0).all().item<bool>());
}

TEST(GroupedGemm, MistakesAreNamed) {
  const at::Tensor x = draw({6, kK}, at::kFloat), dy = draw({6, kN}, at::kFloat),
                   w = draw({2, kN, kK}, at::kFloat), counts = counts_of({2, 4});
  at::Tensor y = at::empty({6, kN}), dx = at::empty({6, kK}), dw = at::empty({2, kN, kK});
  const auto expect = [](const std::function<void()>& call, const std::string& message) {
    EXPECT_THAT(error_of(call), ::testing::HasSubstr(message));
  };
  expect([&] { grouped_forward_into(x, draw({3, kN, kK}, at::kFloat), counts, y); },
         "weight of experts has shape [3, 29, 17], expected [2, *, 17]");
  expect([&] { grouped_input_grad_into(x, w, counts, dx); },
         "weight of experts has shape [2, 29, 17], expected [2, 17, *]");
  expect([&] { grouped_weight_grad(dy, x, counts, at::empty({2, kK, kN}), 0.0); },
         "weight gradient of experts has shape [2, 17, 29], expected [2, 29, 17]");
  expect([&] { grouped_weight_grad(dy.narrow(0, 0, 5), x, counts, dw, 0.0); },
         "input of experts has shape [6, 17], expected [5, *]");
  expect([&] { grouped_weight_grad(dy, x, counts, dw, 0.5); }, "with beta 0.5, expected 0 or 1");
  expect([&] { grouped_weight_grad(dy, x, counts, dw.to(at::kDouble), 0.0); },
         "of Float and Float into Double, expected two of one type into Float");
  expect([&] { grouped_forward_into(x, w, counts_of({2, 4}, at::kFloat), y); },
         "counts of experts are Float, expected Int or Long");
  expect([&] { grouped_forward_into(x, w, counts_of({2, 5}), y); },
         "expert 1 has 5 rows behind 2 of 6");
  expect([&] { grouped_forward_into(x, w, counts_of({-1, 5}), y); },
         "expert 0 has -1 rows behind 0 of 6");
  expect(
      [&] { grouped_forward_into(x, w.transpose(1, 2).contiguous().transpose(1, 2), counts, y); },
      "expected a contiguous one");
}

}  // namespace
}  // namespace megatron
