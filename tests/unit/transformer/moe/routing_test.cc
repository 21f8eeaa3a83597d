// Choices, weights, capacity and bias of a router, against numbers computed with NumPy in fp64 from
// the formulas of routing.h.
#include "megatron/transformer/moe/routing.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/tensor/experts/routing.h"
#include "megatron/transformer/moe/capacity.h"
#include "megatron/transformer/moe/expert_bias.h"
#include "tensors.h"

namespace megatron {
namespace {

const Rows kFour = {{1, .5, -.5, 0}, {.25, .25, .25, .25}, {-1, 2, 1.5, 1.75}, {0, -.25, .75, .5}};
const Rows kEight = {{.9, .1, .8, .2, .6, .5, -1, 0},
                     {0, .1, .2, .3, .4, .5, .6, .7},
                     {2, -2, 1, .9, 1.2, .6, 1.1, 1.1}};
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Expected {
  const char* name;
  RoutingOptions options;
  Rows logits;
  std::vector<double> bias;
  Rows choices;
  Rows weights;  // of the first rows
};

RoutingOptions options_of(int64_t topk, RouterScore score, bool pre_softmax = false,
                          double scaling = 0) {
  return {.topk = topk, .score = score, .pre_softmax = pre_softmax, .scaling_factor = scaling};
}

RoutingOptions grouped(int64_t topk, RouterScore score, bool pre_softmax = false,
                       GroupScore group_score = GroupScore::kSum) {
  RoutingOptions options = options_of(topk, score, pre_softmax);
  options.num_groups = 4;
  options.group_topk = 2;
  options.group_score = group_score;
  return options;
}

const std::vector<Expected>& vectors() {
  using enum RouterScore;
  const Rows pairs = {{0, 1}, {0, 1}, {1, 3}, {2, 3}};
  const Rows single = {{0}, {0}, {1}, {2}};
  const std::vector<double> bias = {0, 0, .05, 0, 0, .1, .3, -.3};
  static const std::vector<Expected> all = {
      {"after",
       options_of(2, kSoftmax),
       kFour,
       {},
       pairs,
       {{.622459331, .377540669}, {.5, .5}, {.562176501, .437823499}, {.562176501, .437823499}}},
      {"before",
       options_of(2, kSoftmax, true),
       kFour,
       {},
       pairs,
       {{.455054234, .276004345}, {.25, .25}, {.410657631, .319820485}, {.381818305, .297360395}}},
      {"beforeScaled",
       options_of(2, kSoftmax, true, 2.5),
       kFour,
       {},
       pairs,
       {{1.137635585, .690010862}}},
      {"sigmoid",
       options_of(2, kSigmoid),
       kFour,
       {},
       pairs,
       {{.540117403, .459882597}, {.5, .5}, {.508323266, .491676734}, {.521787689, .478212311}}},
      {"sqrtsoftplus",
       options_of(2, kSqrtSoftplus),
       kFour,
       {},
       pairs,
       {{.53727805, .46272195}, {.5, .5}, {.513429032, .486570968}, {.51930848, .48069152}}},
      {"sigmoidBiasedScaled",
       options_of(2, kSigmoid, false, 2.5),
       kFour,
       {0, .2, -.3, .1},
       {{1, 0}, {1, 3}, {1, 3}, {3, 1}},
       {{1.149706492, 1.350293508},
        {1.25, 1.25},
        {1.270808165, 1.229191835},
        {1.467672854, 1.032327146}}},
      {"sigmoidOfOne",
       options_of(1, kSigmoid),
       kFour,
       {},
       single,
       {{.731058579}, {.562176501}, {.880797078}, {.679178699}}},
      {"beforeOfOne",
       options_of(1, kSoftmax, true),
       kFour,
       {},
       single,
       {{.455054234}, {.25}, {.410657631}, {.381818305}}},
      {"groupedSigmoid",
       grouped(4, kSigmoid),
       kEight,
       {},
       {{2, 4, 5, 3}, {7, 6, 5, 4}, {6, 7, 2, 3}},
       {{.2751178, .2574465, .248197, .2192387},
        {.2635858, .2546977, .245547, .2361695},
        {.2549712, .2549712, .2484457, .2416118}}},
      {"groupedSigmoidBiased",
       grouped(4, kSigmoid),
       kEight,
       bias,
       {{2, 5, 4, 3}, {6, 5, 4, 7}, {6, 4, 5, 7}},
       {{.2751178, .248197, .2574465, .2192387},
        {.2546977, .245547, .2361695, .2635858},
        {.2574055, .2636719, .2215171, .2574055}}},
      {"groupedBefore",
       grouped(4, kSoftmax, true),
       kEight,
       {},
       {{0, 4, 5, 1}, {7, 6, 5, 4}, {0, 6, 7, 1}},
       {{.2075538, .1537596, .1391275, .0932599}}},
      {"groupedBeforeByMaximum",
       grouped(4, kSoftmax, true, GroupScore::kMax),
       kEight,
       {},
       {{0, 2, 3, 1}, {7, 6, 5, 4}, {0, 4, 5, 1}},
       {{.2075538, .1878024, .1030682, .0932599}}},
      {"groupedAfter",
       grouped(2, kSoftmax),
       kEight,
       {},
       {{0, 2}, {7, 6}, {0, 4}},
       {{.5249792, .4750208}, {.5249792, .4750208}, {.6899745, .3100255}}}};
  return all;
}

class RoutingVectors : public testing::TestWithParam<size_t> {};

TEST_P(RoutingVectors, EqualTheFormulas) {
  const Expected& expected = vectors()[GetParam()];
  const at::Tensor logits = matrix(expected.logits);
  const at::Tensor bias = expected.bias.empty() ? at::Tensor() : vector(expected.bias);
  const Routing routing = route(logits, bias, expected.options);
  EXPECT_EQ(routing.choices.scalar_type(), at::kInt);
  EXPECT_TRUE(at::equal(routing.choices.to(at::kDouble), matrix(expected.choices)))
      << routing.choices;
  const auto rows = static_cast<int64_t>(expected.weights.size());
  expect_matrix(routing.weights.narrow(0, 0, rows), expected.weights);
  const Routing single =
      route(logits.to(at::kFloat), bias.defined() ? bias.to(at::kFloat) : bias, expected.options);
  EXPECT_EQ(single.weights.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(single.choices, routing.choices));
  EXPECT_LE(distance(single.weights, routing.weights), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Routing, RoutingVectors, testing::Range(size_t{0}, vectors().size()),
                         [](const auto& info) { return vectors()[info.param].name; });

TEST(Routing, TheLayerVector) {
  const at::Tensor x = matrix({{1, 2}, {-1, .5}, {.5, -2}});
  const at::Tensor weight = matrix({{1, 0}, {0, 1}, {-.5, .5}});
  at::Tensor logits = x.mm(weight.t()).set_requires_grad(true);
  expect_matrix(logits.detach(), {{1, 2, .5}, {-1, .5, .75}, {.5, -2, -1.25}});
  const Routing routing = route(logits, {}, {});
  expect_matrix(routing.choices, {{1, 0}, {2, 1}, {0, 2}});
  expect_matrix(routing.weights.detach(),
                {{.731058579, .268941421}, {.562176501, .437823499}, {.851952802, .148047198}});
}

// The k lowest of equal ones, in order; groups alike.
TEST(Routing, TiesGoToTheLowestIndex) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    for (const auto score :
         {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
      const at::Tensor equal = at::full({300, 64}, 0.75, type);
      const at::Tensor first = at::arange(8, at::kInt).expand({300, 8});
      RoutingOptions options = options_of(8, score);
      EXPECT_TRUE(at::equal(choose_experts(equal, {}, options), first));
      options.num_groups = 16;
      options.group_topk = 2;
      EXPECT_TRUE(at::equal(choose_experts(equal, {}, options), first));
      options.group_score = GroupScore::kMax;
      EXPECT_TRUE(at::equal(choose_experts(equal, {}, options), first));
    }
  }
  // Saturated scores are equal though logits are not.
  const at::Tensor high = matrix({{40, 60, 50, 1}});
  expect_matrix(choose_experts(high.to(at::kFloat), {}, options_of(3, RouterScore::kSigmoid)),
                {{0, 1, 2}});
  expect_matrix(choose_experts(high, {}, options_of(3, RouterScore::kSoftmax)), {{1, 2, 0}});
}

TEST(Routing, NotANumberGivesLegalChoices) {
  for (const bool whole_row : {true, false}) {
    at::Tensor logits = random_matrix({40, 16}, 3).to(at::kFloat);
    (whole_row ? logits : logits.narrow(1, 3, 2)).fill_(kNan);
    for (const auto score :
         {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
      for (const int64_t groups : {0, 4}) {
        RoutingOptions options = options_of(6, score);
        options.num_groups = groups;
        options.group_topk = groups / 2;
        const Routing routing = route(logits, {}, options);
        const at::Tensor sorted = std::get<0>(routing.choices.to(at::kLong).sort(1));
        EXPECT_GE(sorted.min().item<int64_t>(), 0);
        EXPECT_LT(sorted.max().item<int64_t>(), 16);
        EXPECT_TRUE(sorted.narrow(1, 1, 5).gt(sorted.narrow(1, 0, 5)).all().item<bool>())
            << "distinct";
        EXPECT_TRUE(routing.weights.isnan().all().item<bool>());
      }
    }
  }
}

TEST(Routing, NoRowsAndOneExpert) {
  for (const auto score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    RoutingOptions options = options_of(2, score);
    for (const int64_t groups : {0, 2}) {
      options.num_groups = groups;
      options.group_topk = groups / 2;
      const Routing none = route(at::empty({0, 4}), {}, options);
      EXPECT_EQ(none.choices.sizes(), (at::IntArrayRef{0, 2}));
      EXPECT_EQ(none.weights.sizes(), (at::IntArrayRef{0, 2}));
      Routing dropped = none;
      dropped.kept = within_capacity(none, 4, {});
      EXPECT_EQ(dropped.kept.sizes(), (at::IntArrayRef{0, 2}));
      EXPECT_EQ(padding_to_capacity(dropped, 4, 0).sizes(), (at::IntArrayRef{0, 4}));
    }
    options = options_of(1, score, /*pre_softmax=*/true);
    const Routing one = route(random_matrix({5, 1}, 1), {}, options);
    EXPECT_TRUE(at::equal(one.choices, at::zeros({5, 1}, at::kInt)));
    if (score == RouterScore::kSoftmax) expect_matrix(one.weights, {{1}, {1}, {1}, {1}, {1}});
  }
  EXPECT_TRUE(at::equal(count_assignments(at::empty({0, 2}, at::kInt), {}, 3, 4),
                        at::zeros({3, 4}, at::kInt)));
  EXPECT_EQ(sinkhorn(at::empty({0, 4})).sizes(), (at::IntArrayRef{0, 4}));
  EXPECT_THROW(route(at::zeros({3, 4}), {}, options_of(5, RouterScore::kSigmoid)), InternalError);
  EXPECT_THROW(route(at::zeros({3, 4}, at::kBFloat16), {}, {}), InternalError);
}

// The weights' gradient against central differences.
TEST(Routing, WeightsAreDifferentiable) {
  const at::Tensor logits = random_matrix({5, 6}, 11);
  const at::Tensor coefficients = random_matrix({5, 3}, 12);
  for (const auto score :
       {RouterScore::kSoftmax, RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const bool pre_softmax : {false, true}) {
      const RoutingOptions options = options_of(3, score, pre_softmax, 2.5);
      const at::Tensor leaf = logits.clone().set_requires_grad(true);
      const Routing routing = route(leaf, {}, options);
      (routing.weights * coefficients).sum().backward();
      at::Tensor numeric = at::zeros_like(logits);
      constexpr double kStep = 1e-6;
      for (int64_t i = 0; i < logits.numel(); ++i) {
        double value[2];
        for (const int side : {0, 1}) {
          at::Tensor moved = logits.clone();
          moved.view({-1})[i] += side == 0 ? -kStep : kStep;
          value[side] = (routing_weights(moved, routing.choices, options) * coefficients)
                            .sum()
                            .item<double>();
        }
        numeric.view({-1})[i] = (value[1] - value[0]) / (2 * kStep);
      }
      EXPECT_LE(distance(leaf.grad(), numeric), 1e-8);
    }
  }
}

// Where the score underflows, value and gradient are 0.
TEST(Routing, SqrtSoftplusUnderflows) {
  const at::Tensor leaf = at::full({1, 2}, -300.0, at::kFloat).set_requires_grad(true);
  const Routing routing = route(leaf, {}, options_of(1, RouterScore::kSqrtSoftplus));
  EXPECT_EQ(routing.weights.item<float>(), 0.0F);
  routing.weights.sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::zeros({1, 2})));
}

// Sums and counts of a pass, by sequence: rows 0 and 2, and rows 1 and 3.
TEST(Routing, SharesAreNormalised) {
  const at::Tensor logits = matrix(kFour);
  RouterSums wanted{.shares = true, .squares = true, .counts = true};
  const RouterPass whole = router_sums(logits, {}, wanted);
  const at::Tensor sums = whole.sums.sum(2);  // over parts
  expect_matrix(sums.narrow(1, 0, 4), {{.90585787, 1.077125081, .982431073, 1.034585977}});
  expect_matrix(sums.narrow(1, 4, 2), {{17.157831877, 4}});
  expect_matrix(whole.counts, {{2, 3, 1, 2}});
  for (const auto score : {RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    const RouterPass pass = router_sums(logits, {.score = score}, wanted);
    EXPECT_NEAR(pass.sums.narrow(1, 0, 4).sum().item<double>(), 4, 1e-12);
    expect_matrix(pass.sums.sum(2).narrow(1, 4, 1), {{17.157831877}});
  }
  wanted.sequences = 2;
  expect_matrix(router_sums(logits, {}, wanted).counts, {{1, 2, 0, 1}, {1, 1, 1, 1}});
  wanted.padding = at::tensor({0, 0, 1, 0}, at::kInt).to(at::kBool);
  const RouterPass rest = router_sums(logits, {}, wanted);
  expect_matrix(rest.counts, {{1, 1, 0, 0}, {1, 1, 1, 1}});
  expect_matrix(rest.sums.sum(2).narrow(1, 5, 1), {{1}, {2}});
  expect_matrix(rest.sums.sum(2).narrow(0, 0, 1).narrow(1, 0, 4),
                {{.455054234, .276004345, .101536317, .167405104}});
}

// The counts are those of the k highest shares, whatever was chosen.
TEST(Routing, CountsKnowNoBiasAndNoGroups) {
  const at::Tensor logits = matrix(kEight);
  const RouterSums wanted{.counts = true};
  const at::Tensor plain = count_assignments(top_experts(logits, 4), {}, 1, 8);
  const at::Tensor bias = vector({0, 0, .05, 0, 0, .1, .3, -.3});
  for (const RoutingOptions& options :
       {grouped(4, RouterScore::kSigmoid), options_of(4, RouterScore::kSigmoid)}) {
    const RouterPass pass = router_pass(logits, bias, options, {}, wanted);
    EXPECT_TRUE(at::equal(pass.counts, plain));
    EXPECT_FALSE(at::equal(count_assignments(pass.choices, {}, 1, 8), plain));
    EXPECT_TRUE(at::equal(router_pass(logits, {}, options, pass.choices, wanted).counts, plain));
  }
}

TEST(Routing, AssignmentsAreCountedBySequence) {
  const at::Tensor choices = at::tensor({0, 1, 2, 1, 3, 0, 1, -1}, at::kInt).view({4, 2});
  expect_matrix(count_assignments(choices, {}, 1, 4), {{2, 3, 1, 1}});
  expect_matrix(count_assignments(choices, {}, 2, 4), {{2, 1, 0, 1}, {0, 2, 1, 0}});
  const at::Tensor padding = at::tensor({0, 0, 1, 0}, at::kInt).to(at::kBool);
  expect_matrix(count_assignments(choices, padding, 2, 4), {{1, 1, 0, 0}, {0, 2, 1, 0}});
  const at::Tensor kept = at::tensor({1, 0, 1, 1, 1, 1, 0, 1}, at::kInt).to(at::kBool).view({4, 2});
  at::Tensor counts = at::full({1, 4}, 10, at::kInt);
  add_assignments(choices, kept, padding, counts);
  expect_matrix(counts, {{11, 11, 11, 10}});
}

TEST(Sinkhorn, EqualsTheVector) {
  const at::Tensor logits = matrix({{1, 0}, {.9, .2}, {.8, .1}, {.7, .65}});
  expect_matrix(sinkhorn(logits), {{.1487729, .10122675},
                                   {.13031287, .11968705},
                                   {.13031287, .11968705},
                                   {.09060136, .15939914}});
  const at::Tensor choices = sinkhorn_choices(logits, 1, /*training=*/true);
  expect_matrix(choices, {{0}, {0}, {0}, {1}});
  expect_matrix(sinkhorn_weights(logits, choices),
                {{.73105858}, {.7109495}, {.68997448}, {.65701046}});
  expect_matrix(sinkhorn_choices(logits, 1, /*training=*/false), {{0}, {0}, {0}, {0}});
}

Routing six_rows() {
  return {at::tensor({0, 1, 0, 2, 0, 1, 0, 2, 1, 2, 0, 1}, at::kInt).view({6, 2}),
          matrix({{.6, .4}, {.7, .3}, {.55, .45}, {.8, .2}, {.6, .4}, {.5, .5}}),
          {},
          {}};
}

// The rows that remain, by expert.
std::vector<std::vector<int64_t>> rows_kept(const Routing& routing, const at::Tensor& kept) {
  std::vector<std::vector<int64_t>> rows(3);
  for (int64_t row = 0; row < routing.choices.size(0); ++row)
    for (int64_t j = 0; j < routing.choices.size(1); ++j)
      if (kept[row][j].item<bool>())
        rows[static_cast<size_t>(routing.choices[row][j].item<int>())].push_back(row);
  return rows;
}

TEST(Capacity, KeepsTheHighestWeightsOrTheFirstRows) {
  using Kind = std::vector<std::vector<int64_t>>;
  const Routing routing = six_rows();
  const auto kept = [&](double factor, DropPolicy policy) {
    return rows_kept(routing, within_capacity(routing, 3, {factor, policy}));
  };
  EXPECT_EQ(expert_capacity(6, 2, 3, .5), 2);
  EXPECT_EQ(kept(.5, DropPolicy::kProbs), (Kind{{1, 3}, {4, 5}, {1, 4}}));
  EXPECT_EQ(kept(.5, DropPolicy::kPosition), (Kind{{0, 1}, {0, 2}, {1, 3}}));
  EXPECT_EQ(expert_capacity(6, 2, 3, 1), 4);
  for (const DropPolicy policy : {DropPolicy::kProbs, DropPolicy::kPosition}) {
    EXPECT_EQ(kept(1, policy), (Kind{{0, 1, 2, 3}, {0, 2, 4, 5}, {1, 3, 4}}));
    EXPECT_EQ(kept(3, policy), (Kind{{0, 1, 2, 3, 5}, {0, 2, 4, 5}, {1, 3, 4}}));
  }
  EXPECT_EQ(expert_capacity(6, 2, 3, 3), 6) << "no more than there are rows";
  EXPECT_EQ(expert_capacity(7, 2, 3, .5), 3) << "rounded up";
}

at::Tensor padding_of(Routing routing, int64_t experts, const CapacityOptions& options) {
  routing.kept = within_capacity(routing, experts, options);
  return padding_to_capacity(
      routing, experts,
      expert_capacity(routing.choices.size(0), routing.choices.size(1), experts, options.factor));
}

TEST(Capacity, PaddingFillsEveryExpert) {
  const Routing routing = six_rows();
  expect_matrix(padding_of(routing, 3, {1.0}),
                {{0, 0, 1}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}});
  expect_matrix(padding_of(routing, 3, {3.0}),
                {{0, 0, 1}, {0, 1, 0}, {0, 0, 1}, {0, 1, 0}, {1, 0, 0}, {0, 0, 1}});
}

// Equal weights: the lower rows. A weight of 0 is a choice; no choice comes before it.
TEST(Capacity, TiesGoToTheLowerRows) {
  const Routing equal{at::zeros({6, 1}, at::kInt), at::full({6, 1}, 0.0, at::kDouble), {}, {}};
  for (const DropPolicy policy : {DropPolicy::kProbs, DropPolicy::kPosition}) {
    expect_matrix(within_capacity(equal, 2, {1.0, policy}), {{1}, {1}, {1}, {0}, {0}, {0}});
    expect_matrix(padding_of(equal, 2, {1.0, policy}),
                  {{0, 1}, {0, 1}, {0, 1}, {0, 0}, {0, 0}, {0, 0}});
  }
}

TEST(ExpertBias, MovesTowardsTheMeanUnlessSkipped) {
  const at::Tensor start = vector({0, .001, -.002, 0}).to(at::kFloat);
  const at::Tensor counts = at::tensor({5, 3, 0, 4}, at::kInt);
  at::Tensor bias = start.clone();
  update_expert_bias(bias, counts, 1e-3, at::zeros({}, at::kLong));
  EXPECT_LE(distance(bias, vector({-.001, .001, -.001, -.001})), 1e-9);
  update_expert_bias(bias, at::tensor({2, 2, 2, 2}, at::kInt), 1e-3, at::zeros({}, at::kLong));
  EXPECT_LE(distance(bias, vector({-.001, .001, -.001, -.001})), 1e-9);
  at::Tensor skipped = start.clone();
  update_expert_bias(skipped, counts, 1e-3, at::ones({}, at::kLong));
  EXPECT_TRUE(at::equal(skipped, start));
}

// Differences of one in counts that fp32 does not tell apart.
TEST(ExpertBias, CountsAreExact) {
  at::Tensor bias = at::zeros({2});
  update_expert_bias(bias, at::tensor({100000001, 100000000}, at::kInt), 1.0,
                     at::zeros({}, at::kLong));
  EXPECT_TRUE(at::equal(bias, at::tensor({-1.0F, 1.0F})));
}

}  // namespace
}  // namespace megatron
