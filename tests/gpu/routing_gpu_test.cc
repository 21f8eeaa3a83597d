// The router's passes on a GPU: choices, weights and counts bit for bit those of the CPU, in a
// graph, and their times.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "megatron/nn/functional.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/moe/router.h"
#include "megatron/transformer/moe/router_product.h"
#include "tests/kernels/routing_cases.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr std::array<double, kBalanceTerms> kCoefficients = {0.3, 0.2, 0.1, 0.01};

class RoutingGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

// Every second row has many ties.
at::Tensor draw_logits(int64_t rows, int64_t experts, at::ScalarType type = at::kFloat) {
  at::manual_seed(static_cast<uint64_t>(rows + experts));
  at::Tensor logits = at::randn({rows, experts}, at::kDouble) * 2;
  logits.slice(0, 0, rows, 2).mul_(2).round_().div_(2);
  return logits.to(type);
}

struct Results {
  RouterPass pass;
  RouterLosses losses;
  at::Tensor dlogits, counts;
};

struct Inputs {
  at::Tensor logits, bias, padding, of_sequence, dweights;
  RoutingOptions options;

  Inputs on(at::Device device) const {
    Inputs there = *this;
    for (at::Tensor* t :
         {&there.logits, &there.bias, &there.padding, &there.of_sequence, &there.dweights})
      if (t->defined()) *t = t->to(device);
    return there;
  }
};

Inputs inputs_of(const NamedRouting& named, int64_t rows, int64_t experts, int64_t topk,
                 at::ScalarType type = at::kFloat) {
  Inputs inputs;
  inputs.logits = draw_logits(rows, experts, type);
  if (named.biased) inputs.bias = at::randn({experts}) * 0.25;
  inputs.padding = at::rand({rows}) < 0.1;
  inputs.of_sequence = at::rand({rows % 2 == 0 ? 2 : 1}, at::kDouble);
  inputs.dweights = at::randn({rows, topk}).to(type);
  inputs.options = routing_of(named, topk);
  return inputs;
}

Results compute(const Inputs& in) {
  const RouterSums sums{.sequences = in.of_sequence.numel(),
                        .padding = in.padding,
                        .shares = true,
                        .squares = true,
                        .counts = true};
  Results results;
  results.pass = router_pass(in.logits, in.bias, in.options, {}, sums);
  results.losses = router_losses(results.pass, results.pass.counts.sum(0), in.of_sequence,
                                 in.options.topk, kCoefficients);
  std::array<at::Tensor, kBalanceTerms> dlosses;
  dlosses.fill(at::ones({}, results.losses.weights.options()));
  results.dlogits = router_backward(in.logits, in.options, results.pass.choices, in.dweights, sums,
                                    results.losses, dlosses);
  results.counts = at::zeros_like(results.pass.counts);
  add_assignments(results.pass.choices, {}, in.padding, results.counts);
  return results;
}

bool equal_there(const at::Tensor& gpu, const at::Tensor& cpu) {
  return at::equal(gpu.to(at::kCPU), cpu);
}

void expect_equal(const Inputs& in, const std::string& what) {
  const Results here = compute(in), there = compute(in.on(kGpu)), again = compute(in.on(kGpu));
  const bool fp32 = in.logits.scalar_type() == at::kFloat;
  EXPECT_TRUE(equal_there(there.pass.choices, here.pass.choices)) << what;
  EXPECT_TRUE(equal_there(there.pass.counts, here.pass.counts)) << what;
  EXPECT_TRUE(equal_there(there.counts, here.counts)) << what;
  EXPECT_TRUE(!fp32 || equal_there(there.pass.weights, here.pass.weights)) << what;
  const double bound = fp32 ? 3e-6 : 1e-12;
  const auto near = [&](const at::Tensor& gpu, const at::Tensor& cpu) {
    EXPECT_LT(relative_error(gpu.to(at::kCPU), cpu), bound) << what;
  };
  near(there.pass.weights, here.pass.weights);
  near(there.pass.sums.sum(2), here.pass.sums.sum(2));
  for (size_t i = 0; i < kBalanceTerms; ++i) {
    near(there.losses.losses[i], here.losses.losses[i]);
    EXPECT_TRUE(at::equal(there.losses.losses[i], again.losses.losses[i])) << what;
  }
  near(there.losses.weights, here.losses.weights);
  near(there.dlogits, here.dlogits);
  EXPECT_TRUE(at::equal(there.dlogits, again.dlogits)) << what;
}

TEST_F(RoutingGpu, IsTheCpus) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const NamedRouting& named : named_routings())
      for (const int64_t rows : {0, 1, 7, 8192})
        for (const int64_t experts : {4, 8, 64, 128, 256, 384}) {
          if (type == at::kDouble && rows == 8192 && experts > 64) continue;
          const int64_t topk = experts <= 8 ? 2 : experts <= 64 ? 6 : 8;
          expect_equal(inputs_of(named, rows, experts, topk, type),
                       std::string(named.name) + " " + c10::toString(type) + " " +
                           std::to_string(rows) + " x " + std::to_string(experts));
        }
}

TEST_F(RoutingGpu, NotANumberGivesLegalChoices) {
  constexpr int64_t kExperts = 64, kTopk = 6;
  for (const bool whole_row : {true, false}) {
    for (const NamedRouting& named : named_routings()) {
      Inputs in = inputs_of(named, 40, kExperts, kTopk);
      (whole_row ? in.logits : in.logits.narrow(1, 33, 2))
          .fill_(std::numeric_limits<double>::quiet_NaN());
      const RouterPass here = router_pass(in.logits, in.bias, in.options);
      const Inputs there = in.on(kGpu);
      const RouterPass pass = router_pass(there.logits, there.bias, there.options);
      EXPECT_TRUE(equal_there(pass.choices, here.choices)) << named.name;
      EXPECT_TRUE(pass.weights.isnan().all().item<bool>()) << named.name;
      const at::Tensor sorted = std::get<0>(pass.choices.to(at::kLong).sort(1));
      EXPECT_GE(sorted.min().item<int64_t>(), 0);
      EXPECT_LT(sorted.max().item<int64_t>(), kExperts);
      EXPECT_TRUE(
          sorted.narrow(1, 1, kTopk - 1).gt(sorted.narrow(1, 0, kTopk - 1)).all().item<bool>())
          << named.name << ": distinct";
    }
  }
}

// Nothing is read on the host: a captured graph serves other logits.
TEST_F(RoutingGpu, IsCaptured) {
  for (const NamedRouting& named : named_routings()) {
    const Inputs in = inputs_of(named, 512, 64, 6).on(kGpu);
    const at::Tensor first = in.logits.clone(), second = first.flip(1).contiguous();
    Results eager = compute(in), captured;
    DeviceGraphPool pool(kGpu);
    DeviceGraph graph(pool, [&] { captured = compute(in); });
    for (const at::Tensor& logits : {first, second, first}) {
      in.logits.copy_(logits);
      eager = compute(in);
      graph.launch();
      EXPECT_TRUE(at::equal(captured.pass.choices, eager.pass.choices)) << named.name;
      EXPECT_TRUE(at::equal(captured.pass.weights, eager.pass.weights)) << named.name;
      EXPECT_TRUE(at::equal(captured.counts, eager.counts)) << named.name;
      EXPECT_TRUE(at::equal(captured.dlogits, eager.dlogits)) << named.name;
      for (size_t i = 0; i < kBalanceTerms; ++i)
        EXPECT_TRUE(at::equal(captured.losses.losses[i], eager.losses.losses[i])) << named.name;
    }
  }
}

// Logits and gradients of bf16 operands: rounded in no product, but for the input's gradient.
TEST_F(RoutingGpu, ProductsAreSummedInFp32) {
  constexpr int64_t kRows = 512, kHidden = 256, kExperts = 24;
  RouterOptions options;
  options.hidden_size = kHidden;
  options.num_experts = kExperts;
  const ParallelGroups groups;
  Router router(options, 1, groups);
  PlainParameterStore store(router, at::kBFloat16, kGpu, /*gradients=*/true);
  Parameter& weight = *router.parameters()[0];
  at::manual_seed(3);
  weight.value.copy_(at::randn({kExperts, kHidden}));
  const at::Tensor x =
      at::randn({kRows, 1, kHidden}).to(at::kBFloat16).to(kGpu).set_requires_grad(true);
  const at::Tensor dl = at::randn({kRows, kExperts});
  const at::Tensor logits = router_logits(x, weight, nullptr, at::kFloat);
  logits.backward(dl.to(kGpu));
  const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kCPU, at::kDouble); };
  const at::Tensor rows = wide(x).view({kRows, kHidden}), w = wide(weight.value);
  EXPECT_LT(relative_error(wide(logits), rows.mm(w.t())), 1e-5);
  EXPECT_LT(relative_error(wide(store.grad(weight)), dl.to(at::kDouble).t().mm(rows)), 3e-5);
  EXPECT_LT(relative_error(wide(x.grad()).view({kRows, kHidden}), dl.to(at::kDouble).mm(w)), 5e-3);
}

double microseconds(const at::Tensor& on, const std::function<void()>& work) {
  constexpr int kRuns = 50;
  std::vector<double> times;
  for (int round = 0; round < 5; ++round) {
    work();
    on.view(-1)[0].item();
    const auto begin = std::chrono::steady_clock::now();
    for (int run = 0; run < kRuns; ++run) work();
    on.view(-1)[0].item();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count() /
        kRuns);
  }
  std::sort(times.begin(), times.end());
  return times[2];
}

// Prints times of graphs, without the host's; no bound, the clock of a machine is its own.
TEST_F(RoutingGpu, Times) {
  struct Load {
    const char* routing;
    int64_t rows, experts, topk;
  };
  for (const Load& load : {Load{"after", 8192, 8, 2}, Load{"after", 16384, 128, 8},
                           Load{"before", 8192, 64, 6}, Load{"grouped_biased", 8192, 256, 8}}) {
    for (const NamedRouting& named : named_routings()) {
      if (std::string(named.name) != load.routing) continue;
      const Inputs in = inputs_of(named, load.rows, load.experts, load.topk).on(kGpu);
      const Results done = compute(in);
      const auto time = [&](const std::function<void()>& work) {
        DeviceGraphPool pool(kGpu);
        DeviceGraph graph(pool, work);
        return microseconds(done.counts, [&] { graph.launch(); });
      };
      const double choice = time([&] { router_pass(in.logits, in.bias, in.options); });
      const double all = time([&] { compute(in); });
      std::printf(
          "%-15s %5ld x %-3ld top %ld: choice and weights %5.1f us, all with backward %5.1f "
          "us\n",
          load.routing, static_cast<long>(load.rows), static_cast<long>(load.experts),
          static_cast<long>(load.topk), choice, all);
    }
  }
}

}  // namespace
}  // namespace megatron
