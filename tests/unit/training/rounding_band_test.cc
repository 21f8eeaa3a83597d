// The band of proofs in the run's own type: what it lets pass and what it sees.
#include "megatron/training/proving/rounding_band.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int kParameters = 6;

std::string parameter(int i) { return cat("layers.", i, ".weight"); }

// Traces whose gradients are off by rounding errors of bf16's size alone.
class Traces {
 public:
  explicit Traces(uint64_t seed) : random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    for (int step = 0; step < kRoundingSteps; ++step) {
      for (TrainingTrace* trace : {&exact, &serial, &layout}) {
        trace->steps.emplace_back();
        const double error = trace == &exact ? 0 : 1e-3 * normal(1).item<double>();
        trace->steps.back().numbers["loss"] = {Quantity::kLoss, 5 + error};
      }
      for (int i = 0; i < kParameters; ++i) {
        // From small vectors to larger matrices, whose errors average out
        const at::Tensor grad = normal(8 << i) * std::pow(10.0, i % 3);
        exact.steps.back().grads[parameter(i)] = grad;
        for (TrainingTrace* trace : {&serial, &layout})
          trace->steps.back().grads[parameter(i)] = grad + noise(grad);
      }
    }
  }
  // Rounding errors of bf16's size.
  at::Tensor noise(const at::Tensor& grad) {
    return 0x1p-8 * grad.square().mean().sqrt() * normal(grad.numel());
  }
  std::vector<std::string> failures() const {
    std::vector<std::string> out;
    for (const Comparison& c : compare_rounding(layout, serial, exact, {at::kBFloat16}).comparisons)
      if (!c.holds()) out.push_back(c.name);
    return out;
  }
  void scale(int i, double factor) {
    for (TracedStep& step : layout.steps) step.grads[parameter(i)] *= factor;
  }

  TrainingTrace exact, serial, layout;

 private:
  at::Tensor normal(int64_t size) {
    return at::normal(0.0, 1.0, {size}, random_, at::TensorOptions().dtype(at::kDouble));
  }
  at::Generator random_;
};

TEST(RoundingBand, RoundingHolds) {
  for (uint64_t seed = 1; seed <= 40; ++seed)
    EXPECT_EQ(Traces(seed).failures(), std::vector<std::string>{}) << seed;
}

TEST(RoundingBand, SeesOnePercentInOneGradient) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Traces traces(seed);
    const int i = static_cast<int>(seed) % kParameters;
    traces.scale(i, seed % 2 == 0 ? 1.01 : 0.99);
    EXPECT_THAT(traces.failures(), testing::Contains("bias of the gradient of " + parameter(i)))
        << seed;
  }
}

// Nor does the rounding of one step whose gradient is much larger than the others.
TEST(RoundingBand, OneStepDoesNotDecideAlone) {
  Traces traces(1);
  const at::Tensor large = 50 * traces.exact.steps[5].grads[parameter(3)];
  traces.exact.steps[5].grads[parameter(3)] = large;
  traces.serial.steps[5].grads[parameter(3)] = 0.98 * large;
  traces.layout.steps[5].grads[parameter(3)] = 1.02 * large;
  EXPECT_EQ(traces.failures(), std::vector<std::string>{});
}

// scipy.stats.t.isf(scipy.stats.norm.sf(5.32), steps - 1)
TEST(RoundingBand, FewStepsHaveAWiderBand) {
  EXPECT_NEAR(standard_errors(16), 9.456, 0.1);
  EXPECT_NEAR(standard_errors(32), 6.878, 0.01);
  EXPECT_NEAR(standard_errors(64), 6.0058, 0.001);
  EXPECT_NEAR(standard_errors(512), 5.39722, 0.0001);
}

TEST(RoundingBand, SeesMoreNoise) {
  Traces traces(1);
  for (TracedStep& step : traces.layout.steps) {
    at::Tensor& grad = step.grads[parameter(3)];
    grad = grad + 3 * traces.noise(grad);
  }
  EXPECT_EQ(traces.failures(),
            std::vector<std::string>{"noise of the gradient of " + parameter(3)});
}

// One step whose rounding crosses the kink of an activation is no more noise of all of them.
TEST(RoundingBand, NoiseOfOneStepIsNoMoreNoise) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Traces traces(seed);
    at::Tensor& grad = traces.layout.steps[5].grads[parameter(3)];
    grad = grad + 20 * traces.noise(grad);
    EXPECT_EQ(traces.failures(), std::vector<std::string>{}) << seed;
  }
}

// A gradient that is rounding alone has no bias that could be seen, and is named.
TEST(RoundingBand, NamesWhatRoundingHides) {
  Traces traces(1);
  for (TracedStep& step : traces.exact.steps) step.grads[parameter(0)] *= 1e-9;
  for (TrainingTrace* trace : {&traces.serial, &traces.layout})
    for (TracedStep& step : trace->steps)
      step.grads[parameter(0)] = 0.01 * at::randn_like(step.grads[parameter(0)]);
  const RoundingComparison compared =
      compare_rounding(traces.layout, traces.serial, traces.exact, {at::kBFloat16});
  ASSERT_EQ(compared.hidden.size(), 1u);
  EXPECT_EQ(compared.hidden[0].name, "gradient of " + parameter(0));
  EXPECT_GT(compared.hidden[0].visible, 1);
  for (const Comparison& c : compared.comparisons) EXPECT_TRUE(c.holds()) << c.name;
}

TEST(RoundingBand, CountsAndStatesOfOneOrderAreExact) {
  Traces traces(1);
  for (TrainingTrace* trace : {&traces.exact, &traces.serial, &traces.layout})
    for (TracedStep& step : trace->steps)
      step.numbers["weight of the tokens"] = {Quantity::kLoss, 100, /*exact=*/true};
  traces.serial.states["fp8.linear"] = at::ones({3}, at::kDouble);
  traces.layout.states["fp8.linear"] = at::ones({3}, at::kDouble) * 1.001;
  EXPECT_EQ(traces.failures(), std::vector<std::string>{});
  traces.layout.steps[2].numbers["weight of the tokens"].value = 99;
  EXPECT_EQ(traces.failures(), std::vector<std::string>{"step 3 weight of the tokens"});
  bool seen = false;
  for (const Comparison& c :
       compare_rounding(traces.layout, traces.serial, traces.exact, {at::kBFloat16, true})
           .comparisons)
    seen |= c.name == "fp8.linear" && !c.holds();
  EXPECT_TRUE(seen);
}

}  // namespace
}  // namespace megatron
