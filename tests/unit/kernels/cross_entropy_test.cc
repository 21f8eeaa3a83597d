#include "megatron/kernels/cross_entropy.h"

#include <algorithm>

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

constexpr double kZ = 1e-2;

double log_sum_exp(const Doubles& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double value : x) sum += std::exp(value - top);
  return top + std::log(sum);
}

// Two elements more between rows than columns; padding columns hold NaN.
struct Logits {
  Logits(DType dtype, int64_t tokens, int64_t columns, int64_t valid, double scale)
      : stride(columns + 2), elements(dtype, padded(tokens, columns, valid, scale)) {
    const int64_t elsewhere[2] = {-2, valid};
    for (int64_t t = 0; t < tokens; ++t)
      targets.push_back(t % 3 == 2 ? elsewhere[t % 2] : (t * 7 + valid / 2) % valid);
    ce.dtype = dtype;
    ce.tokens = tokens;
    ce.columns = columns;
    ce.valid = valid;
    ce.logits = elements.data();
    ce.stride = stride;
    ce.targets = targets.data();
  }
  Logits(const Logits&) = delete;

  Doubles padded(int64_t tokens, int64_t columns, int64_t valid, double scale) const {
    Doubles values = normal_values(tokens * stride, 1, scale);
    for (int64_t t = 0; t < tokens; ++t) {
      std::fill(values.begin() + t * stride + valid, values.begin() + t * stride + columns,
                std::nan(""));
    }
    return values;
  }
  Doubles row(int64_t t) const { return slice(elements.values(), t * stride, ce.valid); }
  bool here(int64_t t) const { return targets[t] >= 0 && targets[t] < ce.valid; }

  int64_t stride;
  Elements elements;
  std::vector<int64_t> targets;  // every third in another shard
  CrossEntropy ce;
};

void test_parts(DType dtype, int64_t columns, int64_t valid, double scale) {
  constexpr int64_t kTokens = 6;
  const Logits logits(dtype, kTokens, columns, valid, scale);
  Elements max(wide(dtype), kTokens), target(wide(dtype), kTokens), sum(wide(dtype), kTokens);
  const CrossEntropySums sums = {max.data(), sum.data(), target.data()};
  cross_entropy_sums_cpu(logits.ce, sums, 0, 2);
  EXPECT_TRUE(std::isnan(max[2]));
  cross_entropy_sums_cpu(logits.ce, sums, 2, kTokens);
  Doubles expected_max, expected_target, expected_sum;
  for (int64_t t = 0; t < kTokens; ++t) {
    const Doubles row = logits.row(t);
    expected_max.push_back(*std::max_element(row.begin(), row.end()));
    expected_target.push_back(logits.here(t) ? row[logits.targets[t]] : 0.0);
    expected_sum.push_back(std::exp(log_sum_exp(row) - expected_max.back()));
  }
  EXPECT_EQ(max.values(), expected_max);
  EXPECT_EQ(target.values(), expected_target);
  expect_near(sum, expected_sum, tolerance(wide(dtype)), "sum");
}

// The gradient of scale (lse - target + z lse^2) by differences; without a target in this shard
// only the softmax.
void test_backward(DType dtype, int64_t columns, int64_t valid, bool in_place) {
  constexpr int64_t kTokens = 3;
  Logits logits(dtype, kTokens, columns, valid, 2.0);
  const Elements scales(wide(dtype), normal_values(kTokens, 3));
  Doubles lses, expected(kTokens * logits.stride, 0.0);
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto loss = [&](const Doubles& x) {
      const double lse = log_sum_exp(x);
      return scales[t] * (lse - (logits.here(t) ? x[logits.targets[t]] : 0.0) + kZ * lse * lse);
    };
    lses.push_back(log_sum_exp(logits.row(t)));
    const Doubles gradient = differences(logits.row(t), loss);
    std::copy(gradient.begin(), gradient.end(), expected.begin() + t * logits.stride);
  }
  const Elements lse(wide(dtype), lses);
  Elements apart(dtype, kTokens * logits.stride);
  Elements& dlogits = in_place ? logits.elements : apart;
  CrossEntropyBackward backward;
  backward.lse = lse.data();
  backward.scale = scales.data();
  backward.z_coeff = kZ;
  backward.dlogits = dlogits.data();
  backward.stride = logits.stride;
  const Doubles before = dlogits.values();
  cross_entropy_backward_cpu(logits.ce, backward, 0, 1);
  cross_entropy_backward_cpu(logits.ce, backward, 1, kTokens);

  // Padding columns become zero; what lies between the rows stays.
  Doubles got = dlogits.values();
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t i = columns; i < logits.stride; ++i) {
      double& between = got[t * logits.stride + i];
      const double old = before[t * logits.stride + i];
      EXPECT_TRUE(between == old || (std::isnan(between) && std::isnan(old)));
      between = 0.0;
    }
  }
  expect_near(Elements(dtype, got), expected, gradient_tolerance(dtype), "dlogits");
}

class CrossEntropyKernels : public FloatingTypes {};

TEST_P(CrossEntropyKernels, Parts) {
  test_parts(GetParam(), 1, 1, 2.0);
  test_parts(GetParam(), 40, 37, 2.0);
  test_parts(GetParam(), 1100, 1090, 2.0);  // longer than one run of the kernel
  test_parts(GetParam(), 64, 61, 300.0);    // exp of a logit alone would overflow
}

TEST_P(CrossEntropyKernels, Backward) {
  test_backward(GetParam(), 40, 37, false);
  test_backward(GetParam(), 40, 37, true);
  test_backward(GetParam(), 1100, 1060, false);
  test_backward(GetParam(), 1100, 700, true);  // the last run is padding alone
}

TEST_P(CrossEntropyKernels, NothingValid) {
  Logits logits(GetParam(), 3, 8, 5, 1.0);
  logits.ce.valid = 0;
  Elements max(wide(GetParam()), 3), sum(wide(GetParam()), 3), target(wide(GetParam()), 3);
  cross_entropy_sums_cpu(logits.ce, {max.data(), sum.data(), target.data()}, 0, 3);
  EXPECT_EQ(max.values(), Doubles(3, -std::numeric_limits<double>::infinity()));
  EXPECT_EQ(sum.values(), Doubles(3, 0.0));
  EXPECT_EQ(target.values(), Doubles(3, 0.0));
}

INSTANTIATE_TEST_SUITE_P(Types, CrossEntropyKernels, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
