#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/kernels/detail/activation_math.h"

namespace megatron {
namespace {

// |got - exact| in units in the last place of the exact value as fp32.
double ulps(float got, double exact) {
  const float rounded = static_cast<float>(exact);
  const float next = std::nextafter(std::abs(rounded), std::numeric_limits<float>::infinity());
  return std::abs(static_cast<double>(got) - exact) /
         (static_cast<double>(next) - std::abs(rounded));
}

TEST(Math, ExpIsAccurate) {
  double worst = 0;
  for (float x = -87.0f; x < 88.7f; x += 0.00137f)
    worst = std::max(worst, ulps(fast_exp(x), std::exp(double{x})));
  EXPECT_LT(worst, 2.0);
}

TEST(Math, ExpAtTheEnds) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(fast_exp(0.0f), 1.0f);
  EXPECT_EQ(fast_exp(-infinity), 0.0f);
  EXPECT_EQ(fast_exp(-1e30f), 0.0f);
  EXPECT_EQ(fast_exp(infinity), infinity);
  EXPECT_EQ(fast_exp(89.0f), infinity);
  EXPECT_TRUE(std::isnan(fast_exp(std::nanf(""))));
  EXPECT_NEAR(fast_exp(-95.0f), std::exp(-95.0), 1e-44);  // subnormal
}

TEST(Math, LogIsAccurate) {
  double worst = 0;
  for (double x = 1.2e-10; x <= 1.0; x *= 1.00003) {
    const float rounded = static_cast<float>(x);
    worst = std::max(worst, ulps(fast_log(rounded), std::log(double{rounded})));
  }
  EXPECT_LT(worst, 2.0);
  EXPECT_EQ(fast_log(1.0f), 0.0f);
}

TEST(Math, SinesOfTurnsAreAccurate) {
  double worst = 0;
  for (uint64_t turn = 0; turn < (uint64_t{1} << 32); turn += 4093) {
    float sine, cosine;
    sincos_turn(static_cast<uint32_t>(turn), &sine, &cosine);
    const double angle = 2 * M_PI * static_cast<double>(turn) / 4294967296.0;
    worst = std::max({worst, std::abs(sine - std::sin(angle)), std::abs(cosine - std::cos(angle))});
  }
  EXPECT_LT(worst, 1.2e-7);
}

TEST(Math, NormalDistributionFunctionIsAccurate) {
  double relative = 0, absolute = 0;
  for (float x = -12.0f; x < 8.0f; x += 0.00091f) {
    const double exact = 0.5 * std::erfc(-double{x} / std::sqrt(2.0)),
                 error = std::abs(normal_cdf(x) - exact);
    absolute = std::max(absolute, error);
    if (x > -5.0f) relative = std::max(relative, error / exact);
  }
  EXPECT_LT(absolute, 1.2e-7);
  EXPECT_LT(relative, 1e-4);
  EXPECT_EQ(normal_cdf(0.0f), 0.5f);
  EXPECT_EQ(normal_cdf(40.0f), 1.0f);
  EXPECT_EQ(normal_cdf(-40.0f), 0.0f);
  EXPECT_TRUE(std::isnan(normal_cdf(std::nanf(""))));
}

TEST(Math, SigmoidOfExtremes) {
  EXPECT_EQ(fast_sigmoid(200.0f), 1.0f);
  EXPECT_EQ(fast_sigmoid(-200.0f), 0.0f);
  EXPECT_EQ(fast_sigmoid(0.0f), 0.5f);
}

}  // namespace
}  // namespace megatron
