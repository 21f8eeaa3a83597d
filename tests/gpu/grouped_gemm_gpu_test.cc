// Grouped products on a GPU against loops on the CPU, ATen's grouped product, and themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/experts/grouped_gemm.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "tests/gpu/timing.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr double kBf16 = 4e-3, kFp32 = 1e-5;
constexpr int64_t kBeyond = 37;  // rows behind the sum of the counts

class GroupedGemmGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

at::Tensor draw(at::IntArrayRef shape, uint64_t seed, at::ScalarType type = at::kBFloat16) {
  at::manual_seed(seed);
  return at::randn(shape).to(type);
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.to(at::kCPU, at::kDouble);
  const double length = at::linalg_vector_norm(wide, 2).item<double>();
  const double error = at::linalg_vector_norm(a.to(at::kCPU, at::kDouble) - wide, 2).item<double>();
  return error == 0 ? 0 : error / length;
}

struct Case {
  int64_t n, k;
  std::vector<int64_t> rows;
  at::ScalarType type = at::kBFloat16;

  int64_t experts() const { return static_cast<int64_t>(rows.size()); }
  int64_t sum() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  at::Tensor counts() const {
    return at::tensor(rows, at::kLong).to(experts() % 2 == 0 ? at::kInt : at::kLong);
  }
};

std::vector<Case> cases() {
  std::vector<int64_t> many(300), skewed(40, 130);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int64_t>(i) % 7;
  for (const size_t i : {0, 1, 2, 30, 39}) skewed[i] = 0;
  skewed[7] = 1111;
  std::vector<Case> all = {{264, 136, {100, 0, 1, 513, 0}},
                           {8, 8, {3}},
                           {64, 32, {0, 0}},
                           {512, 1024, skewed},
                           {64, 128, many},
                           // without kernels of their own
                           {29, 17, {5, 0, 40}},
                           {64, 32, {5, 0, 40}, at::kHalf},
                           {64, 32, {5, 0, 40}, at::kFloat}};
  return all;
}

struct Results {
  at::Tensor y, dx, assigned, added;
};

// The three products of one case on a device. What no product may read is NaN.
Results compute(const Case& one, at::Device device) {
  const int64_t all = one.sum() + kBeyond;
  at::Tensor x = draw({all, one.k}, 1, one.type), dy = draw({all, one.n}, 2, one.type),
             w = draw({one.experts(), one.n, one.k}, 3, one.type);
  x.narrow(0, one.sum(), kBeyond).fill_(std::nan(""));
  dy.narrow(0, one.sum(), kBeyond).fill_(std::nan(""));
  x = x.to(device);
  dy = dy.to(device);
  w = w.to(device);
  const at::Tensor counts = one.counts().to(device);
  Results results;
  results.y = at::full({all, one.n}, 5, w.options());
  results.dx = at::full({all, one.k}, 5, w.options());
  results.added = draw({one.experts(), one.n, one.k}, 4, at::kFloat).to(device);
  results.assigned = at::full_like(results.added, std::nan(""));
  grouped_forward_into(x, w, counts, results.y);
  grouped_input_grad_into(dy, w, counts, results.dx);
  grouped_weight_grad(dy, x, counts, results.added, 1.0);
  grouped_weight_grad(dy, x, counts, results.assigned, 0.0);
  return results;
}

TEST_F(GroupedGemmGpu, ProductsAreTheCpus) {
  for (const Case& one : cases()) {
    const Results here = compute(one, at::kCPU), there = compute(one, kGpu),
                  again = compute(one, kGpu);
    const std::string what = std::to_string(one.experts()) + " experts " + std::to_string(one.n) +
                             " x " + std::to_string(one.k) + " " + c10::toString(one.type);
    EXPECT_LT(distance(there.y, here.y), kBf16) << what;
    EXPECT_LT(distance(there.dx, here.dx), kBf16) << what;
    EXPECT_LT(distance(there.assigned, here.assigned), kFp32) << what;
    EXPECT_LT(distance(there.added, here.added), kFp32) << what;
    for (const auto& [a, b] :
         {std::pair{&there.y, &again.y}, std::pair{&there.dx, &again.dx},
          std::pair{&there.assigned, &again.assigned}, std::pair{&there.added, &again.added}})
      EXPECT_TRUE(at::equal(*a, *b)) << what << ": another run gave other bits";
    EXPECT_TRUE((there.y.narrow(0, one.sum(), kBeyond) == 5).all().item<bool>()) << what;
    EXPECT_TRUE((there.dx.narrow(0, one.sum(), kBeyond) == 5).all().item<bool>()) << what;
  }
}

// A row's result depends on its own expert alone, to the bit.
TEST_F(GroupedGemmGpu, OtherExpertsDoNotMatter) {
  constexpr int64_t kN = 384, kK = 640;
  const at::Tensor w = draw({4, kN, kK}, 1).to(kGpu), x = draw({300, kK}, 2).to(kGpu);
  const auto run = [&](const std::vector<int64_t>& rows, int64_t first) {
    const at::Tensor all = draw({1000, kK}, 3).to(kGpu);
    all.narrow(0, first, 300).copy_(x);
    at::Tensor y = at::zeros({1000, kN}, w.options());
    grouped_forward_into(all, w, at::tensor(rows, at::kInt).to(kGpu), y);
    return y.narrow(0, first, 300).clone();
  };
  const at::Tensor alone = run({0, 0, 300, 0}, 0);
  EXPECT_TRUE(at::equal(run({128, 57, 300, 400}, 185), alone));
  EXPECT_TRUE(at::equal(run({0, 500, 300, 1}, 500), alone));
}

// One captured graph serves all counts: nothing of them is on the host.
TEST_F(GroupedGemmGpu, CountsAreReadOnTheDevice) {
  const Case first{256, 192, {90, 10, 0, 200}}, second{256, 192, {0, 299, 1, 0}};
  const at::Tensor x = draw({300, 192}, 1).to(kGpu), dy = draw({300, 256}, 2).to(kGpu),
                   w = draw({4, 256, 192}, 3).to(kGpu), counts = first.counts().to(kGpu);
  const auto run = [&](Results& results) {
    results = {at::empty({300, 256}, x.options()),
               at::empty({300, 192}, x.options()),
               at::empty({4, 256, 192}, x.options().dtype(at::kFloat)),
               {}};
    grouped_forward_into(x, w, counts, results.y);
    grouped_input_grad_into(dy, w, counts, results.dx);
    grouped_weight_grad(dy, x, counts, results.assigned, 0.0);
  };
  Results eager, captured;
  run(eager);
  DeviceGraphPool pool(kGpu);
  DeviceGraph graph(pool, [&] { run(captured); });
  for (const Case& one : {first, second, first}) {
    counts.copy_(one.counts());
    run(eager);
    graph.launch();
    EXPECT_TRUE(at::equal(captured.y, eager.y));
    EXPECT_TRUE(at::equal(captured.dx, eager.dx));
    EXPECT_TRUE(at::equal(captured.assigned, eager.assigned));
  }
}

// Half of the rows on one expert, a quarter of the experts without rows, the others uneven.
std::vector<int64_t> skewed(int64_t experts, int64_t rows) {
  std::vector<int64_t> counts(static_cast<size_t>(experts), 0);
  const size_t favourite = counts.size() / 3, empty = counts.size() / 4;
  std::vector<size_t> others;
  for (size_t i = 0; i < counts.size(); ++i)
    if (i != favourite) others.push_back(i);
  others.erase(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(empty));
  int64_t left = rows - rows / 2, weights = 0;
  counts[favourite] = rows / 2;
  for (size_t i = 0; i < others.size(); ++i) weights += 10 + static_cast<int64_t>(i * 7 % 11);
  for (size_t i = 0; i < others.size(); ++i)
    counts[others[i]] = (rows - rows / 2) * (10 + static_cast<int64_t>(i * 7 % 11)) / weights;
  for (const size_t i : others) left -= counts[i];
  counts[others[0]] += left;
  return counts;
}

struct Load {
  const char* name;
  int64_t experts, rows;
  std::vector<std::array<int64_t, 2>> weights;  // n, k
  bool skewed;
};

// Rates of one weight under one load, relative to one dense product of as many rows.
void print_rates(const Load& load, int64_t n, int64_t k) {
  const std::vector<int64_t> rows =
      load.skewed
          ? skewed(load.experts, load.rows)
          : std::vector<int64_t>(static_cast<size_t>(load.experts), load.rows / load.experts);
  const at::Tensor counts = at::tensor(rows, at::kLong).to(kGpu);
  const at::Tensor ends = counts.cumsum(0).to(at::kInt);
  const auto options = at::dtype(at::kBFloat16).device(kGpu);
  const at::Tensor x = at::randn({load.rows, k}, options), dy = at::randn({load.rows, n}, options),
                   w = at::randn({load.experts, n, k}, options) * 0.02, w0 = w[0].clone();
  at::Tensor y = at::empty_like(dy), dx = at::empty_like(x),
             dw = at::zeros({load.experts, n, k}, options.dtype(at::kFloat)),
             dw0 = at::zeros({n, k}, options.dtype(at::kFloat));
  const double flop = 2.0 * static_cast<double>(load.rows) * static_cast<double>(n * k);
  const auto print = [&](const char* product, const std::vector<std::function<void()>>& works) {
    const std::vector<double> ms = milliseconds(dw, works);
    std::printf("%-14s %5ld x %-5ld %-22s dense %4.0f TFLOP/s, grouped %3.0f%%, ATen's %3.0f%%\n",
                load.name, static_cast<long>(n), static_cast<long>(k), product, flop / ms[0] * 1e-9,
                100 * ms[0] / ms[1], 100 * ms[0] / ms[2]);
  };
  print("forward",
        {[&] { linear_forward_into(x, w0, {}, y); }, [&] { grouped_forward_into(x, w, counts, y); },
         [&] { at::_grouped_mm(x, w.transpose(1, 2), ends); }});
  print("input gradient", {[&] { linear_input_grad_into(dy, w0, dx); },
                           [&] { grouped_input_grad_into(dy, w, counts, dx); },
                           [&] { at::_grouped_mm(dy, w, ends); }});
  for (const double beta : {0.0, 1.0})
    print(beta == 0.0 ? "weight gradient" : "weight gradient added",
          {[&] { linear_weight_grad(dy, x, dw0, beta); },
           [&] { grouped_weight_grad(dy, x, counts, dw, beta); },
           [&] { at::_grouped_mm(dy.t(), x, ends); }});  // into bf16
}

// Prints rates; no bound, the clock of a machine is its own. Weights of fc1 and fc2.
TEST_F(GroupedGemmGpu, Rates) {
  const std::vector<std::array<int64_t, 2>> few = {{14336, 2048}, {2048, 7168}},
                                            many = {{1536, 2048}, {2048, 768}};
  for (const Load& load :
       {Load{"8 x 2048", 8, 16384, few, false}, Load{"128 x 512", 128, 65536, many, false},
        Load{"8 skewed", 8, 16384, few, true}, Load{"128 skewed", 128, 65536, many, true}})
    for (const auto& [n, k] : load.weights) print_rates(load, n, k);
}

// What bounds weight gradients of many experts: times by rows of an expert, beside those of writing
// the gradients alone.
TEST_F(GroupedGemmGpu, RatesOfWeightGradientsByRows) {
  constexpr int64_t kExperts = 128, kN = 1536, kK = 2048;
  const auto options = at::dtype(at::kBFloat16).device(kGpu);
  const at::Tensor dw = at::zeros({kExperts, kN, kK}, options.dtype(at::kFloat)),
                   dw0 = at::zeros({kN, kK}, options.dtype(at::kFloat));
  const std::vector<double> bare = milliseconds(dw, {[&] { dw.zero_(); }, [&] { dw.add_(1.0); }});
  std::printf("gradients alone: written %.3f ms, read and written %.3f\n", bare[0], bare[1]);
  for (const int64_t rows : {64, 128, 256, 512, 1024, 2048}) {
    const at::Tensor counts = at::full({kExperts}, rows, at::kLong).to(kGpu),
                     x = at::randn({kExperts * rows, kK}, options),
                     dy = at::randn({kExperts * rows, kN}, options);
    const std::vector<double> ms =
        milliseconds(dw, {[&] { linear_weight_grad(dy, x, dw0, 1.0); },
                          [&] { grouped_weight_grad(dy, x, counts, dw, 0.0); },
                          [&] { grouped_weight_grad(dy, x, counts, dw, 1.0); }});
    std::printf("%5ld rows of an expert: dense %.3f ms, grouped %.3f, added %.3f\n",
                static_cast<long>(rows), ms[0], ms[1], ms[2]);
  }
}

TEST_F(GroupedGemmGpu, ProductsAreAtens) {
  constexpr int64_t kN = 768, kK = 512;
  const Case one{kN, kK, {300, 0, 128, 77, 519}};
  const at::Tensor x = draw({one.sum(), kK}, 1).to(kGpu), dy = draw({one.sum(), kN}, 2).to(kGpu),
                   w = draw({one.experts(), kN, kK}, 3).to(kGpu), counts = one.counts().to(kGpu);
  const at::Tensor ends = counts.cumsum(0).to(at::kInt);
  at::Tensor y = at::empty_like(dy), dx = at::empty_like(x);
  grouped_forward_into(x, w, counts, y);
  grouped_input_grad_into(dy, w, counts, dx);
  EXPECT_LT(distance(y, at::_grouped_mm(x, w.transpose(1, 2), ends)), 1e-3);
  EXPECT_LT(distance(dx, at::_grouped_mm(dy, w, ends)), 1e-3);
}

}  // namespace
}  // namespace megatron
