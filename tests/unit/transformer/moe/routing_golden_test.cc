// Routing, capacity and losses against megatron-core's moe_utils:
// tests/golden/moe/make_routing_golden.py. It computes softmax in fp32.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "loss_pass.h"
#include "megatron/transformer/moe/capacity.h"
#include "megatron/transformer/moe/routing.h"
#include "tensors.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr int64_t kRowsOfGolden = 10, kExpertsOfGolden = 8;
constexpr double kBound = 1e-6;

const json& golden() {
  static const json all = json::parse(
      std::ifstream(std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/moe/routing_golden.json"));
  return all;
}

at::Tensor table(const json& numbers) {
  return at::tensor(numbers.get<std::vector<double>>(), at::kDouble)
      .view({kRowsOfGolden, kExpertsOfGolden});
}

at::Tensor row_index() { return at::arange(kRowsOfGolden, at::kDouble).unsqueeze(1); }
at::Tensor column_index() { return at::arange(kExpertsOfGolden, at::kDouble).unsqueeze(0); }

at::Tensor golden_logits() {
  const at::Tensor i = row_index(), j = column_index();
  return (2.0 * (1.7 * i + 0.9 * j + 0.31 * i * j).sin()).set_requires_grad(true);
}

at::Tensor golden_bias() { return 0.2 * at::arange(kExpertsOfGolden, at::kDouble).sin(); }

struct GoldenRouting {
  const char* name;
  RoutingOptions options;
  bool biased = false;
};

const GoldenRouting kRoutings[] = {
    {"after", {.topk = 2}},
    {"before", {.topk = 3, .pre_softmax = true, .scaling_factor = 2.5}},
    {"sigmoid", {.topk = 3, .score = RouterScore::kSigmoid}},
    {"sigmoid_one", {.topk = 1, .score = RouterScore::kSigmoid}},
    {"sigmoid_biased", {.topk = 2, .score = RouterScore::kSigmoid, .scaling_factor = 1.5}, true},
    {"grouped_before", {.topk = 4, .pre_softmax = true, .num_groups = 4, .group_topk = 2}},
    {"grouped_biased",
     {.topk = 4, .score = RouterScore::kSigmoid, .num_groups = 4, .group_topk = 2},
     true}};

// The weights in a table of all experts.
at::Tensor spread(const Routing& routing, const at::Tensor& weights) {
  return at::zeros({kRowsOfGolden, kExpertsOfGolden}, at::kDouble)
      .scatter(1, routing.choices.to(at::kLong), weights);
}

TEST(RoutingGolden, WeightsGradientsAndCapacityAreMegatrons) {
  for (const GoldenRouting& one : kRoutings) {
    SCOPED_TRACE(one.name);
    const json& expected = golden().at("routings").at(one.name);
    const at::Tensor logits = golden_logits();
    const Routing routing = route(logits, one.biased ? golden_bias() : at::Tensor(), one.options);
    const at::Tensor probs = spread(routing, routing.weights);
    EXPECT_LE(distance(probs.detach(), table(expected.at("probs"))), kBound);
    (probs * (0.3 * row_index() + column_index()).cos()).sum().backward();
    EXPECT_LE(distance(logits.grad(), table(expected.at("grad"))), kBound);
    for (const auto& [factor, name] : {std::pair(0.5, "probs_0.5"), std::pair(1.0, "probs_1.0")}) {
      const at::Tensor kept =
          within_capacity(routing, kExpertsOfGolden, {factor, DropPolicy::kProbs});
      EXPECT_LE(
          distance(spread(routing, routing.weights.detach() * kept), table(expected.at(name))),
          kBound)
          << name;
    }
  }
}

// Tokens that weigh 1 / tokens: their mean.
TEST(RoutingGolden, LossesAreMegatrons) {
  struct Loss {
    const char* name;
    BalanceOptions options;
    RouterScore score;
  };
  for (const Loss& loss : {Loss{"micro_softmax", {.micro = 0.3}, RouterScore::kSoftmax},
                           Loss{"micro_sigmoid", {.micro = 0.3}, RouterScore::kSigmoid},
                           Loss{"z", {.z = 0.3}, RouterScore::kSoftmax}}) {
    const ParallelGroups one;
    RouterBalance balance(loss.options, 1, loss.score, 2, /*divides_rows=*/false, one);
    LossPass pass(loss.options);
    pass.context.tokens.of_sequence = vector({1.0 / kRowsOfGolden});
    const at::Tensor logits = golden_logits();
    balance.add_losses(logits, LayerContext{pass.context, {}});
    pass.tape.backward((logits * 0).sum());
    const json& expected = golden().at(loss.name);
    EXPECT_NEAR(pass.totals[0][0].item<double>(), expected.at("value").get<double>(), kBound);
    EXPECT_LE(distance(logits.grad() / kLossScale, table(expected.at("grad"))), kBound);
  }
}

TEST(RoutingGolden, SinkhornIsMegatrons) {
  EXPECT_LE(distance(sinkhorn(golden_logits().detach()), table(golden().at("sinkhorn"))), 1e-8);
}

}  // namespace
}  // namespace megatron
