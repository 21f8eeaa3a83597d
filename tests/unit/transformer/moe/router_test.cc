// The router as a module: products, recomputation, draws, counts, replay.
#include "megatron/transformer/moe/router.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/functional.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/transformer/moe/expert_bias.h"
#include "megatron/transformer/moe/router_product.h"
#include "megatron/transformer/moe/routing_replay.h"
#include "tensors.h"

namespace megatron {
namespace {

constexpr int64_t kHidden = 8, kExperts = 6;

RouterOptions router_of(int64_t topk = 2) {
  RouterOptions options;
  options.hidden_size = kHidden;
  options.num_experts = kExperts;
  options.routing.topk = topk;
  options.init = Init::normal(0.5);
  return options;
}

ForwardContext pass_of(int64_t s, int64_t b, bool training = false) {
  ForwardContext pass;
  pass.training = training;
  pass.place.position = at::arange(s, at::kLong);
  pass.place.sample = at::arange(40, 40 + b, at::kLong);
  return pass;
}

// A router with its weights.
struct Built {
  explicit Built(const RouterOptions& options, at::ScalarType type = at::kDouble)
      : router(options, 3, groups), store(router, type, at::kCPU, /*gradients=*/true) {
    router.name_parameters("router");
    initialize_parameters(router, 5, groups);
  }
  Routing forward(const at::Tensor& x, const ForwardContext& pass) {
    return router.forward(x, LayerContext{pass, {}});
  }
  Parameter& parameter(size_t i) { return *router.parameters().at(i); }
  at::Tensor counts() {
    at::Tensor all;
    router.visit_step_counts(
        [&](const std::string&, const at::Tensor& counts) { all = counts.clone(); });
    return all;
  }
  void end_step(bool skipped = false) { router.end_step(at::full({}, skipped ? 1 : 0, at::kLong)); }
  at::Tensor state() {
    at::Tensor found;
    router.visit_state([&](const std::string&, at::Tensor& state) { found = state; });
    return found;
  }
  ParallelGroups groups;
  Router router;
  PlainParameterStore store;
};

TEST(Router, HasMegatronsNamesAndShapes) {
  RouterOptions options = router_of();
  options.add_bias = options.expert_bias = true;
  options.routing.score = RouterScore::kSigmoid;
  Built built(options);
  EXPECT_EQ(built.parameter(0).name, "router.weight");
  EXPECT_EQ(built.parameter(0).global_shape, (std::vector<int64_t>{kExperts, kHidden}));
  EXPECT_EQ(built.parameter(1).name, "router.bias");
  EXPECT_GT(built.parameter(1).value.abs().min().item<double>(), 0);
  EXPECT_EQ(built.state().sizes(), (at::IntArrayRef{kExperts}));
  EXPECT_EQ(built.state().scalar_type(), at::kFloat);
  EXPECT_TRUE(built.parameter(0).placement.partial_grad.empty());
}

TEST(Router, GradientsOfTheProductAreThoseOfAPlainOne) {
  RouterOptions options = router_of();
  options.add_bias = true;
  Built built(options);
  const at::Tensor x = random_matrix({5, 2, kHidden}, 1).set_requires_grad(true);
  const at::Tensor dl = random_matrix({10, kExperts}, 2);
  for (int pass = 0; pass < 2; ++pass)  // accumulates
    router_logits(x, built.parameter(0), &built.parameter(1), at::kDouble).backward(dl);
  const at::Tensor y = x.detach().clone().set_requires_grad(true);
  const at::Tensor w = built.parameter(0).value.clone().set_requires_grad(true);
  const at::Tensor b = built.parameter(1).value.clone().set_requires_grad(true);
  at::linear(y, w, b).view({10, kExperts}).backward(2 * dl);
  EXPECT_LE(distance(x.grad(), y.grad()), 1e-12);
  EXPECT_LE(distance(built.store.grad(built.parameter(0)), w.grad()), 1e-12);
  EXPECT_LE(distance(built.store.grad(built.parameter(1)), b.grad()), 1e-12);
}

// bf16 operands: logits and the weights' gradients as if the operands were fp32.
TEST(Router, Bf16OperandsAreSummedInFp32) {
  Built built(router_of(), at::kBFloat16);
  const at::Tensor x = random_matrix({40, 2, kHidden}, 1).to(at::kBFloat16).set_requires_grad(true);
  const at::Tensor logits = router_logits(x, built.parameter(0), nullptr, at::kFloat);
  EXPECT_EQ(logits.scalar_type(), at::kFloat);
  const at::Tensor wide_x = x.detach().to(at::kDouble).view({80, kHidden});
  const at::Tensor wide_w = built.parameter(0).value.to(at::kDouble);
  EXPECT_LE(distance(logits, wide_x.mm(wide_w.t())), 1e-6) << "not rounded to bf16";
  const at::Tensor dl = random_matrix({80, kExperts}, 2);
  logits.backward(dl.to(at::kFloat));
  EXPECT_LE(distance(built.store.grad(built.parameter(0)), dl.t().mm(wide_x)), 1e-4);
  EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
  EXPECT_LE(distance(x.grad().view({80, kHidden}), dl.mm(wide_w)), 0.05);
  EXPECT_EQ(router_logits(x, built.parameter(0), nullptr, at::kDouble).scalar_type(), at::kDouble);
}

TEST(Router, NoRows) {
  Built built(router_of());
  const at::Tensor x = at::empty({0, 2, kHidden}, at::kDouble).set_requires_grad(true);
  at::Tensor grad = built.store.grad(built.parameter(0));
  grad.fill_(7);
  built.store.zero_grad();
  const Routing routing = built.forward(x, pass_of(0, 2, /*training=*/true));
  EXPECT_EQ(routing.choices.sizes(), (at::IntArrayRef{0, 2}));
  routing.weights.sum().backward();
  EXPECT_TRUE(at::equal(grad, at::zeros_like(grad)));
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_TRUE(at::equal(built.counts(), at::zeros({kExperts}, at::kInt)));
}

TEST(Router, CountsWhatItRoutedInTrainingOnly) {
  RouterOptions options = router_of();
  options.expert_bias = true;
  options.routing.score = RouterScore::kSigmoid;
  Built built(options);
  const at::Tensor x = random_matrix({6, 2, kHidden}, 1);
  built.forward(x, pass_of(6, 2));
  EXPECT_EQ(built.counts().sum().item<int64_t>(), 0) << "evaluation";
  ForwardContext pass = pass_of(6, 2, /*training=*/true);
  pass.discarded = true;
  built.forward(x, pass);
  EXPECT_EQ(built.counts().sum().item<int64_t>(), 0) << "a pass that is dropped";
  pass.discarded = false;
  const Routing routing = built.forward(x, pass);
  const at::Tensor first = count_assignments(routing.choices, {}, 1, kExperts).view({-1});
  EXPECT_TRUE(at::equal(built.counts(), first));
  pass.tokens.padding = at::zeros({2, 6}, at::kBool);
  pass.tokens.padding[1].narrow(0, 4, 2).fill_(true);  // rows 9 and 11
  built.forward(x, pass);
  at::Tensor expected = first * 2;
  for (const int64_t row : {9, 11})
    for (const int64_t j : {0, 1}) expected[routing.choices[row][j].item<int64_t>()] -= 1;
  EXPECT_TRUE(at::equal(built.counts(), expected));

  at::Tensor bias = at::zeros({kExperts});
  update_expert_bias(bias, expected, options.bias_update_rate, at::zeros({}, at::kLong));
  EXPECT_GT(bias.abs().max().item<double>(), 0);
  built.end_step();
  EXPECT_TRUE(at::equal(built.state(), bias));
  EXPECT_EQ(built.counts().sum().item<int64_t>(), 0) << "forgotten";
  built.forward(x, pass);
  built.end_step(/*skipped=*/true);
  EXPECT_TRUE(at::equal(built.state(), bias));
  EXPECT_EQ(built.counts().sum().item<int64_t>(), 0);
  built.parameter(0).trainable = false;
  built.forward(x, pass);
  built.end_step();
  EXPECT_TRUE(at::equal(built.state(), bias)) << "a frozen router";
}

// Choices made with the rounding of the first run are kept although the second rounds otherwise.
TEST(Router, RecomputationNeverRoutesAnew) {
  Built built(router_of());
  // Equal logits: an input that changes in its last bit changes the choices.
  built.parameter(0).value.copy_(built.parameter(0).value[0].expand({kExperts, kHidden}));
  const at::Tensor x = random_matrix({6, 2, kHidden}, 1);
  ForwardContext pass = pass_of(6, 2, /*training=*/true);
  RecomputeTape tape;
  pass.tape = &tape;
  std::vector<at::Tensor> choices;
  const at::Tensor y = tape.run(
      [&](const at::Tensor& in) {
        if (tape.runs_again())
          built.parameter(0).value.add_(random_matrix({kExperts, kHidden}, 9), 1e-13);
        const Routing routing = built.forward(in, pass);
        choices.push_back(routing.choices);
        return routing.weights;
      },
      x.clone().set_requires_grad(true));
  const at::Tensor counts = built.counts();
  tape.backward(y.sum());
  ASSERT_EQ(choices.size(), 2u);
  EXPECT_TRUE(at::equal(choices[0], choices[1]));
  EXPECT_FALSE(at::equal(choices[0], built.forward(x, pass_of(6, 2)).choices))
      << "the changed weights would choose others";
  EXPECT_TRUE(at::equal(built.counts(), counts)) << "counted once";
}

TEST(Router, DropsBeyondItsCapacityAndCountsWhatRemains) {
  RouterOptions options = router_of();
  options.capacity = CapacityOptions{.factor = 0.5, .pad = true};
  Built built(options);
  const at::Tensor x = random_matrix({12, 1, kHidden}, 4).set_requires_grad(true);
  const Routing routing = built.forward(x, pass_of(12, 1, /*training=*/true));
  const at::Tensor plain = Built(router_of()).forward(x.detach(), pass_of(12, 1)).weights;
  EXPECT_LT(routing.kept.sum().item<int64_t>(), 24);
  EXPECT_TRUE(at::equal(routing.weights.detach(), plain * routing.kept)) << "not renormalised";
  EXPECT_EQ(built.counts().sum().item<int64_t>(), routing.kept.sum().item<int64_t>());
  EXPECT_EQ(routing.kept.sum().item<int64_t>() + routing.padding.sum().item<int64_t>(),
            kExperts * expert_capacity(12, 2, kExperts, 0.5));
}

// Draws belong to sample and position, not to the rank or the micro-batch.
TEST(Router, JitterAndForcedRoutingAreDrawnByPlace) {
  const at::Tensor x = random_matrix({6, 4, kHidden}, 1);
  for (const bool forced : {false, true}) {
    RouterOptions options = router_of();
    options.jitter = forced ? 0.0 : 0.3;
    options.forced = {.enabled = forced, .bias_std = forced ? 0.7 : 0.0};
    Built built(options);
    const ForwardContext pass = pass_of(6, 4, /*training=*/true);
    const Routing whole = built.forward(x, pass);
    EXPECT_FALSE(at::equal(whole.weights, Built(router_of()).forward(x, pass).weights));
    ForwardContext part = pass;
    part.place.sample = pass.place.sample.narrow(0, 2, 2);
    part.rows = {part.place.sample, pass.place.position.narrow(0, 3, 3)};
    const Routing own = built.forward(x.narrow(0, 3, 3).narrow(1, 2, 2).contiguous(), part);
    const auto cut = [](const at::Tensor& rows) {
      return rows.view({6, 4, 2}).narrow(0, 3, 3).narrow(1, 2, 2).reshape({6, 2});
    };
    EXPECT_TRUE(at::equal(own.choices, cut(whole.choices)));
    EXPECT_LE(distance(own.weights, cut(whole.weights)), 1e-14);
  }
  RouterOptions options = router_of();
  options.jitter = 0.3;
  const ForwardContext evaluation = pass_of(6, 4);
  EXPECT_TRUE(at::equal(Built(options).forward(x, evaluation).weights,
                        Built(router_of()).forward(x, evaluation).weights))
      << "training only";
}

TEST(Router, ForcedRoutingIsBalancedAndPassesGradients) {
  RouterOptions options = router_of();
  options.forced.enabled = true;
  Built built(options);
  const ForwardContext pass = pass_of(1000, 3, /*training=*/true);
  const at::Tensor x = at::ones({1000, 3, kHidden}, at::kDouble).set_requires_grad(true);
  const Routing routing = built.forward(x, pass);
  EXPECT_NEAR(built.counts().max().item<double>() / 1000, 1.0, 0.1);
  routing.weights.select(1, 0).sum().backward();
  EXPECT_GT(built.store.grad(built.parameter(0)).abs().max().item<double>(), 1e-3);

  options.forced.bias_std = 2.0;
  Built biased(options);
  const Routing first = biased.forward(x, pass);
  EXPECT_GT(biased.counts().max().item<double>() / 1000, 1.2);
  biased.end_step();
  EXPECT_FALSE(at::equal(biased.forward(x, pass).choices, first.choices)) << "another step";
  options.forced.bias_std = -2.0;
  Built fixed(options);
  const Routing before = fixed.forward(x, pass);
  fixed.end_step();
  EXPECT_TRUE(at::equal(fixed.forward(x, pass).choices, before.choices));
}

TEST(Router, SinkhornChoosesInTrainingOnly) {
  RouterOptions options = router_of(1);
  options.sinkhorn = true;
  Built built(options);
  const at::Tensor x = random_matrix({32, 1, kHidden}, 2) + 1;
  const at::Tensor logits = router_logits(x, built.parameter(0), nullptr, at::kDouble).detach();
  EXPECT_TRUE(
      at::equal(built.forward(x, pass_of(32, 1, true)).choices, sinkhorn_choices(logits, 1, true)));
  EXPECT_TRUE(at::equal(built.forward(x, pass_of(32, 1)).choices, top_experts(logits, 1)));
}

// What one router records is imposed on one of the opposite weights, with the same options.
struct Replayed {
  explicit Replayed(const RouterOptions& options) : first(options), other(options) {
    other.parameter(0).value.neg_();
    pass.routing = &replay;
    recorded = first.forward(x, pass);
    replay = {.imposed = &table};
    imposed = other.forward(x, pass);
  }

  Built first, other;
  const at::Tensor x = random_matrix({6, 4, kHidden}, 1);
  RoutingTable table;
  RoutingReplay replay{.record = &table};
  ForwardContext pass = pass_of(6, 4);
  Routing recorded, imposed;
};

TEST(RoutingReplay, ImposesRecordedChoices) {
  Replayed r(router_of());
  EXPECT_TRUE(at::equal(r.imposed.choices, r.recorded.choices));
  const at::Tensor logits = router_logits(r.x, r.other.parameter(0), nullptr, at::kDouble);
  EXPECT_TRUE(at::equal(r.imposed.weights, routing_weights(logits, r.recorded.choices, {})))
      << "weights of its own";
  // Other rows in another order
  ForwardContext part = r.pass;
  part.place = {at::tensor({43, 41}, at::kLong), at::tensor({5, 0, 2}, at::kLong)};
  const at::Tensor own = r.recorded.choices.view({6, 4, 2})
                             .index_select(0, part.place.position)
                             .index_select(1, part.place.sample - 40)
                             .reshape({6, 2});
  EXPECT_TRUE(at::equal(r.other.forward(random_matrix({3, 2, kHidden}, 3), part).choices, own));
}

TEST(RoutingReplay, ImposesWhichChoicesAreKept) {
  RouterOptions options = router_of();
  options.capacity = CapacityOptions{.factor = 0.5};
  Replayed r(options);
  EXPECT_TRUE(at::equal(r.imposed.kept, r.recorded.kept));
  const at::Tensor own = within_capacity(
      {r.recorded.choices,
       routing_weights(router_logits(r.x, r.other.parameter(0), nullptr, at::kDouble),
                       r.recorded.choices, {}),
       {},
       {}},
      kExperts, *options.capacity);
  EXPECT_FALSE(at::equal(own, r.recorded.kept)) << "by weights of its own";
  EXPECT_TRUE(at::equal(r.imposed.weights != 0, r.recorded.kept));
}

TEST(RoutingReplay, NamesWhatWasNotRecorded) {
  RoutingTable table;
  const TokenPositions rows{at::tensor({7}, at::kLong), at::tensor({0, 2}, at::kLong)};
  table.record(4, rows, at::zeros({2, 1}, at::kInt));
  const auto message = [&](int64_t layer, const TokenPositions& wanted) {
    try {
      table.find(layer, wanted);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing");
  };
  EXPECT_EQ(message(4, rows), "nothing");
  EXPECT_EQ(message(5, rows), "no choices of layer 5 are recorded for sample 7");
  EXPECT_EQ(message(4, {rows.sample, at::tensor({2, 1}, at::kLong)}),
            "no choices of layer 4 are recorded for sample 7 at position 1");
  EXPECT_EQ(message(4, {rows.sample, at::tensor({2, 3}, at::kLong)}),
            "no choices of layer 4 are recorded for sample 7 at position 3");
}

}  // namespace
}  // namespace megatron
