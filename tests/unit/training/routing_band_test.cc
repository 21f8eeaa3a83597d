// The comparison of what routers would choose by themselves: what it lets pass and what it sees.
#include "megatron/training/proving/routing_band.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/routing.h"

namespace megatron {
namespace {

constexpr int64_t kPositions = 64, kRouted = 8;
constexpr int kLayers = 2, kSamples = 8;
constexpr double kRounding = 1e-2;

const RoutingOptions kPlain{.topk = 2};
const RoutingOptions kGroups{
    .topk = 2, .score = RouterScore::kSigmoid, .num_groups = 4, .group_topk = 2};

std::string place(int layer, int sample) {
  return cat("layer ", layer, " use 0 sample ", sample, " ");
}

// Routers whose logits are off by rounding errors, and their own choices.
class Routers {
 public:
  Routers(uint64_t seed, const RoutingOptions& options)
      : options_(options), random_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    for (int layer = 1; layer <= kLayers; ++layer)
      for (int sample = 0; sample < kSamples; ++sample) {
        const std::string here = place(layer, sample);
        const at::Tensor logits = normal();
        const at::Tensor bias = options.num_groups > 0 ? normal().select(0, 0) * 0.3 : at::Tensor();
        put(exact, here, logits, bias);
        put(serial, here, logits + kRounding * normal(), bias);
        put(layout, here, logits + kRounding * normal(), bias);
      }
  }
  RoutingComparison compare() const { return compare_routing(layout, serial, exact, options_); }
  std::vector<std::string> failures() const {
    std::vector<std::string> out;
    for (const Comparison& c : compare().comparisons)
      if (!c.holds()) out.push_back(c.name);
    return out;
  }
  // As if the routers of one layer had chosen by logits that are off by `error`.
  void choose_with(double error, int layer) {
    for (int sample = 0; sample < kSamples; ++sample) {
      const std::string here = place(layer, sample);
      const auto bias = exact.find(here + "bias");
      put(layout, here, exact.at(here + "logits") + error * normal(),
          bias == exact.end() ? at::Tensor() : bias->second);
    }
  }

  LogicalTensors exact, serial, layout;

 private:
  at::Tensor normal() {
    return at::normal(0.0, 1.0, shape_, random_, at::TensorOptions().dtype(at::kDouble));
  }
  void put(LogicalTensors& routers, const std::string& here, const at::Tensor& logits,
           const at::Tensor& bias) {
    routers[here + "logits"] = logits;
    routers[here + "choices"] = choose_experts(logits, bias, options_).to(at::kDouble);
    if (bias.defined()) routers[here + "bias"] = bias;
  }
  const RoutingOptions& options_;
  const std::vector<int64_t> shape_ = {kPositions, kRouted};
  at::Generator random_;
};

TEST(RoutingBand, ChoicesNearATieMayDiffer) {
  for (const RoutingOptions& options : {kPlain, kGroups})
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      const Routers routers(seed, options);
      EXPECT_THAT(routers.failures(), testing::IsEmpty()) << seed;
      const RoutingComparison compared = routers.compare();
      EXPECT_EQ(compared.comparisons.size(), size_t{kLayers});
      EXPECT_EQ(compared.tokens, kLayers * kSamples * kPositions);
      EXPECT_GT(compared.differing, 0) << seed;
      EXPECT_LT(compared.differing, compared.tokens / 10) << seed;
    }
}

TEST(RoutingBand, OneChoiceFarFromATieFails) {
  for (const RoutingOptions& options : {kPlain, kGroups}) {
    Routers routers(1, options);
    const std::string here = place(2, 3);
    const at::Tensor worst = std::get<1>(routers.exact.at(here + "logits").min(1));
    at::Tensor choices = routers.layout.at(here + "choices");
    choices[17][1] = worst[17].to(at::kDouble);
    EXPECT_THAT(routers.failures(),
                testing::ElementsAre(testing::HasSubstr("choices of layer 2 use 0, ")));
  }
}

TEST(RoutingBand, ErrorsBeyondThoseOfOneRankFail) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Routers routers(seed, kPlain);
    routers.choose_with(20 * kRounding, /*layer=*/1);
    EXPECT_THAT(routers.failures(),
                testing::ElementsAre(testing::HasSubstr("choices of layer 1 use 0, ")))
        << seed;
  }
}

// A router that forgets the bias of its selection.
TEST(RoutingBand, AnotherRuleFails) {
  Routers routers(1, kGroups);
  for (int sample = 0; sample < kSamples; ++sample) {
    const std::string here = place(1, sample);
    routers.layout[here + "choices"] =
        choose_experts(routers.layout.at(here + "logits"), {}, kGroups).to(at::kDouble);
  }
  EXPECT_THAT(routers.failures(), testing::ElementsAre(testing::HasSubstr("choices of layer 1")));
}

// Padding is computed in some runs and not in others.
TEST(RoutingBand, RowsOfOneRunAloneAreNotCompared) {
  Routers routers(1, kPlain);
  const std::string here = place(1, 0);
  for (const char* what : {"logits", "choices"})
    routers.layout.at(here + what).narrow(0, kPositions - 4, 4).fill_(std::nan(""));
  EXPECT_THAT(routers.failures(), testing::IsEmpty());
  EXPECT_EQ(routers.compare().tokens, kLayers * kSamples * kPositions - 4);
  routers.layout.erase(here + "logits");
  EXPECT_THAT(routers.failures(),
              testing::ElementsAre("choices of layer 1 use 0 sample 0 are missing"));
}

}  // namespace
}  // namespace megatron
