// FP8 products of experts on a GPU against loops on the CPU, and themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>

#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/experts/grouped_gemm.h"
#include "megatron/tensor/experts/quantized_activation.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kBeyond = 37;  // rows behind the sum of the counts
constexpr Orientations kBoth{true, true};

struct Recipe {
  const char* name;
  QuantizationRecipe recipe;
  bool hybrid;
  bool scales_known = false;
};
void PrintTo(const Recipe& recipe, std::ostream* out) { *out << recipe.name; }

at::Tensor draw(at::IntArrayRef shape, uint64_t seed) {
  at::manual_seed(seed);
  return at::randn(shape).to(at::kBFloat16);
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
  int64_t experts() const { return static_cast<int64_t>(rows.size()); }
  int64_t sum() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  at::Tensor counts() const {
    return at::tensor(rows, at::kLong).to(experts() % 2 == 0 ? at::kInt : at::kLong);
  }
};

// As small as covers several tiles of rows, of columns and of depth: the CPU's loops take the time.
std::vector<Case> cases(bool blocks) {
  std::vector<int64_t> many(300), skewed(20, 70);
  for (size_t i = 0; i < many.size(); ++i) many[i] = static_cast<int64_t>(i) % 7;
  for (const size_t i : {0, 1, 2, 15, 19}) skewed[i] = 0;
  skewed[7] = 515;
  std::vector<Case> all = {
      {256, 128, {100, 0, 1, 513, 0}}, {128, 128, {0, 0}}, {256, 384, skewed}, {128, 128, many}};
  if (!blocks) all.insert(all.end(), {{272, 144, {100, 0, 1, 513, 0}}, {16, 16, {3}}});
  return all;
}

struct Results {
  QuantizedTensor x8, g8, w8;
  at::Tensor y, dx, assigned, added, amax, counts;
};

class GroupedFp8Gpu : public ::testing::TestWithParam<Recipe> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    options_.recipe = GetParam().recipe;
    options_.hybrid = GetParam().hybrid;
  }
  bool blocks() const { return options_.recipe == QuantizationRecipe::kBlockwise; }

  ExpertScales scales(OperandRole role, const at::Tensor& known, const at::Tensor& amax) const {
    const auto column = static_cast<int64_t>(role);
    if (blocks()) return {};
    return {known.defined() ? known.select(1, column) : at::Tensor(), amax.select(1, column)};
  }

  // Everything of one case on a device. What nothing may read is NaN.
  Results compute(const Case& one, at::Device device) const {
    const int64_t all = one.sum() + kBeyond;
    at::Tensor x = draw({all, one.k}, 1), dy = draw({all, one.n}, 2),
               w = draw({one.experts(), one.n, one.k}, 3);
    x.narrow(0, one.sum(), kBeyond).fill_(std::nan(""));
    dy.narrow(0, one.sum(), kBeyond).fill_(std::nan(""));
    x = x.to(device);
    dy = dy.to(device);
    w = w.to(device);
    // Those of the first expert were never measured.
    at::Tensor known;
    if (GetParam().scales_known) {
      known = at::full({one.experts(), 3}, 24.0f, w.options().dtype(at::kFloat));
      known[0].zero_();
    }
    Results out;
    out.counts = one.counts().to(device);
    out.amax = at::zeros({one.experts(), 3}, w.options().dtype(at::kFloat));
    const auto by = [&](OperandRole role) { return scales(role, known, out.amax); };
    out.x8 = quantize_expert_rows(x, out.counts, OperandRole::kInput, options_, kBoth,
                                  by(OperandRole::kInput));
    out.g8 = quantize_expert_rows(dy, out.counts, OperandRole::kGradient, options_, kBoth,
                                  by(OperandRole::kGradient));
    out.w8 = quantize_expert_weight(w, options_, kBoth, by(OperandRole::kWeight));
    out.y = at::full({all, one.n}, 5, w.options());
    out.dx = at::full({all, one.k}, 5, w.options());
    at::manual_seed(4);
    out.added = at::randn({one.experts(), one.n, one.k}).to(device);
    out.assigned = at::full_like(out.added, std::nan(""));
    multiply(out);
    return out;
  }
  void multiply(Results& out) const {
    grouped_quantized_product_into(out.x8.rows, out.w8.rows, out.counts, out.y, !blocks());
    grouped_quantized_product_into(out.g8.rows, out.w8.columns, out.counts, out.dx, false);
    if (out.added.defined())
      grouped_quantized_weight_grad(out.g8.columns, out.x8.columns, out.counts, out.added, 1.0);
    grouped_quantized_weight_grad(out.g8.columns, out.x8.columns, out.counts, out.assigned, 0.0);
  }

  QuantizationOptions options_;
};

at::Tensor bytes(const at::Tensor& codes) { return codes.view(at::kByte).view({-1}).cpu(); }

void expect_same_front(const at::Tensor& a, const at::Tensor& b, int64_t count,
                       const std::string& what) {
  EXPECT_TRUE(
      at::equal(a.view({-1}).narrow(0, 0, count).cpu(), b.view({-1}).narrow(0, 0, count).cpu()))
      << what;
}

// The rows of experts, quantised, of [rows, columns]. One scale of an expert without rows means
// nothing.
void expect_same_codes(const QuantizedTensor& a, const QuantizedTensor& b, const Case& one,
                       int64_t columns, int64_t unit, const std::string& what) {
  int64_t padded = 0;
  for (const int64_t rows : one.rows) padded += (rows + unit - 1) / unit * unit;
  expect_same_front(bytes(a.rows.codes), bytes(b.rows.codes), one.sum() * columns,
                    what + " by rows");
  expect_same_front(bytes(a.columns.codes), bytes(b.columns.codes), padded * columns,
                    what + " by columns");
  if (a.rows.layout != ScaleLayout::kTensor) {
    expect_same_front(a.rows.scale, b.rows.scale, one.sum() * columns / kFp8Block,
                      what + " scales by rows");
    expect_same_front(a.columns.scale, b.columns.scale, padded * columns / kFp8Block,
                      what + " scales by columns");
    return;
  }
  for (int64_t expert = 0; expert < one.experts(); ++expert) {
    if (one.rows[static_cast<size_t>(expert)] == 0) continue;
    for (const int64_t place : {int64_t{0}, kFp8InverseAt})
      EXPECT_EQ(a.rows.scale[expert][place].item<float>(),
                b.rows.scale[expert][place].item<float>())
          << what << " expert " << expert;
  }
}

TEST_P(GroupedFp8Gpu, CodesAreTheCpus) {
  for (const Case& one : cases(blocks())) {
    const Results here = compute(one, at::kCPU), there = compute(one, kGpu);
    const std::string what = std::to_string(one.experts()) + " experts " + std::to_string(one.n) +
                             " x " + std::to_string(one.k);
    const int64_t unit = options_.alignment();
    expect_same_codes(here.x8, there.x8, one, one.k, unit, what + " input");
    expect_same_codes(here.g8, there.g8, one, one.n, unit, what + " gradient");
    for (const auto& [a, b] : {std::pair{&here.w8.rows, &there.w8.rows},
                               std::pair{&here.w8.columns, &there.w8.columns}}) {
      EXPECT_TRUE(at::equal(bytes(a->codes), bytes(b->codes))) << what << " weight";
      if (!blocks()) continue;
      EXPECT_TRUE(at::equal(a->scale, b->scale.cpu())) << what << " weight scales";
    }
    EXPECT_TRUE(at::equal(here.amax, there.amax.cpu())) << what << " largest magnitudes";
  }
}

// In one kernel as in two.
TEST_P(GroupedFp8Gpu, ActivationsAreThatOfTwoKernels) {
  const ExpertActivation activations[] = {{Activation::kSwiglu, 0.0, {}},
                                          {Activation::kGeglu, 0.0, {}},
                                          {Activation::kQuickGeglu, 1.0, 0.7}};
  for (const Case& one : cases(blocks())) {
    for (const ExpertActivation& activation : activations) {
      const int64_t all = one.sum() + kBeyond, f = one.k, unit = options_.alignment();
      at::Tensor x = draw({all, 2 * f}, 1), weights = draw({all}, 3).to(at::kFloat);
      for (const at::Tensor& t : {x, weights}) t.narrow(0, one.sum(), kBeyond).fill_(std::nan(""));
      x = x.to(kGpu);
      weights = weights.to(kGpu);
      const at::Tensor counts = one.counts().to(kGpu);
      at::Tensor known;
      if (GetParam().scales_known) {
        known = at::full({one.experts(), 3}, 24.0f, weights.options());
        known[0].zero_();
      }
      const at::Tensor amax[2] = {at::zeros({one.experts(), 3}, weights.options()),
                                  at::zeros({one.experts(), 3}, weights.options())};
      const auto by = [&](OperandRole role, int i) { return scales(role, known, amax[i]); };
      const std::string what = std::to_string(one.experts()) + " experts " + std::to_string(f) +
                               " activation " + std::to_string(static_cast<int>(activation.kind));
      expect_same_codes(
          quantized_weighted_activation(x, weights, activation, counts, options_, kBoth,
                                        by(OperandRole::kInput, 0)),
          quantize_expert_rows(weighted_activation(x, weights, activation), counts,
                               OperandRole::kInput, options_, kBoth, by(OperandRole::kInput, 1)),
          one, f, unit, what);
      EXPECT_TRUE(at::equal(amax[0], amax[1])) << what;
    }
  }
}

// Where the largest magnitude of each row is known, scales follow from it.
TEST_P(GroupedFp8Gpu, ScalesFollowMagnitudesThatAreKnown) {
  if (blocks() || GetParam().scales_known) return;
  for (const Case& one : cases(false)) {
    const at::Tensor x = draw({one.sum() + kBeyond, one.n}, 2).to(kGpu),
                     counts = one.counts().to(kGpu), with_rows = counts > 0;
    const auto codes = [&](const at::Tensor& row_amax) {
      return quantize_expert_rows(x, counts, OperandRole::kGradient, options_, kBoth,
                                  {{}, {}, row_amax});
    };
    const at::Tensor known = x.abs().amax(1).to(at::kFloat);
    expect_same_codes(codes(known), codes({}), one, one.n, 16, "known magnitudes");
    const auto scales = [&](const at::Tensor& row_amax) {
      return codes(row_amax).rows.scale.select(1, 0).index({with_rows});
    };
    EXPECT_TRUE(at::equal(scales(known * 2), scales({}) / 2));
  }
}

TEST_P(GroupedFp8Gpu, ProductsAreTheCpus) {
  for (const Case& one : cases(blocks())) {
    const Results here = compute(one, at::kCPU), there = compute(one, kGpu),
                  again = compute(one, kGpu);
    const std::string what = std::to_string(one.experts()) + " experts " + std::to_string(one.n) +
                             " x " + std::to_string(one.k);
    // bf16; sums of the fast products have about 14 bits
    EXPECT_LT(distance(there.y, here.y), 4e-3) << what;
    EXPECT_LT(distance(there.dx, here.dx), 4e-3) << what;
    EXPECT_LT(distance(there.assigned, here.assigned), 1e-3) << what;
    EXPECT_LT(distance(there.added, here.added), 1e-3) << what;
    for (const auto& [a, b] :
         {std::pair{&there.y, &again.y}, std::pair{&there.dx, &again.dx},
          std::pair{&there.assigned, &again.assigned}, std::pair{&there.added, &again.added}})
      EXPECT_TRUE(at::equal(*a, *b)) << what << ": another run gave other bits";
    EXPECT_TRUE((there.y.narrow(0, one.sum(), kBeyond) == 5).all().item<bool>()) << what;
    EXPECT_TRUE((there.dx.narrow(0, one.sum(), kBeyond) == 5).all().item<bool>()) << what;
  }
}

// One captured graph serves all counts: nothing of them is on the host.
TEST_P(GroupedFp8Gpu, CountsAreReadOnTheDevice) {
  const at::Tensor x = draw({300, 128}, 1).to(kGpu), dy = draw({300, 256}, 2).to(kGpu),
                   w = draw({4, 256, 128}, 3).to(kGpu);
  const at::Tensor counts = at::zeros({4}, at::dtype(at::kInt).device(kGpu));
  const auto run = [&](Results& out) {
    out.counts = counts;
    out.x8 = quantize_expert_rows(x, counts, OperandRole::kInput, options_, kBoth);
    out.g8 = quantize_expert_rows(dy, counts, OperandRole::kGradient, options_, kBoth);
    out.w8 = quantize_expert_weight(w, options_, kBoth);
    out.y = at::empty({300, 256}, x.options());
    out.dx = at::empty({300, 128}, x.options());
    out.assigned = at::empty({4, 256, 128}, x.options().dtype(at::kFloat));
    multiply(out);
  };
  Results eager, captured;
  run(eager);
  DeviceGraphPool pool(kGpu);
  DeviceGraph graph(pool, [&] { run(captured); });
  for (const std::vector<int>& rows : {std::vector<int>{90, 10, 0, 200}, {0, 299, 1, 0}}) {
    counts.copy_(at::tensor(rows, at::kInt));
    run(eager);
    graph.launch();
    EXPECT_TRUE(at::equal(captured.y, eager.y));
    EXPECT_TRUE(at::equal(captured.dx, eager.dx));
    EXPECT_TRUE(at::equal(captured.assigned, eager.assigned));
  }
}

double milliseconds(const at::Tensor& on, const std::function<void()>& work) {
  constexpr size_t kRounds = 5, kRuns = 10;
  std::vector<double> times;
  for (size_t round = 0; round < kRounds; ++round) {
    work();
    on.view(-1)[0].item();
    const auto begin = std::chrono::steady_clock::now();
    for (size_t run = 0; run < kRuns; ++run) work();
    on.view(-1)[0].item();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count() / kRuns);
  }
  std::sort(times.begin(), times.end());
  return times[kRounds / 2];
}

// Prints rates beside those of bf16, and what the casts take; no bound.
TEST_P(GroupedFp8Gpu, Rates) {
  struct Load {
    int64_t experts, rows, n, k;
  };
  for (const Load& load : {Load{8, 16384, 14336, 2048}, Load{8, 16384, 2048, 7168},
                           Load{128, 65536, 1536, 2048}, Load{128, 65536, 2048, 768}}) {
    const auto [experts, rows, n, k] = load;
    const auto bf16 = at::dtype(at::kBFloat16).device(kGpu);
    const at::Tensor counts = at::full({experts}, rows / experts, bf16.dtype(at::kInt));
    const at::Tensor x = at::randn({rows, k}, bf16), dy = at::randn({rows, n}, bf16),
                     w = at::randn({experts, n, k}, bf16) * 0.02;
    Results out;
    out.counts = counts;
    out.y = at::empty_like(dy);
    out.dx = at::empty_like(x);
    out.assigned = at::zeros({experts, n, k}, bf16.dtype(at::kFloat));
    const auto cast_x = [&](Orientations wanted) {
      return quantize_expert_rows(x, counts, OperandRole::kInput, options_, wanted);
    };
    out.x8 = cast_x(kBoth);
    out.g8 = quantize_expert_rows(dy, counts, OperandRole::kGradient, options_, kBoth);
    out.w8 = quantize_expert_weight(w, options_, kBoth);
    const double flop = 2e-9 * static_cast<double>(rows) * static_cast<double>(n * k);
    const auto print = [&](const char* what, const std::function<void()>& fp8,
                           const std::function<void()>& plain) {
      const double a = milliseconds(out.assigned, fp8), b = milliseconds(out.assigned, plain);
      std::printf("%-11s %3ld x %ld rows %5ld x %-5ld %-16s %.3f ms %4.0f TFLOP/s, bf16 %.3f ms\n",
                  GetParam().name, static_cast<long>(experts), static_cast<long>(rows / experts),
                  static_cast<long>(n), static_cast<long>(k), what, a, flop / a, b);
    };
    print(
        "forward",
        [&] { grouped_quantized_product_into(out.x8.rows, out.w8.rows, counts, out.y, !blocks()); },
        [&] { grouped_forward_into(x, w, counts, out.y); });
    print(
        "input gradient",
        [&] { grouped_quantized_product_into(out.g8.rows, out.w8.columns, counts, out.dx, false); },
        [&] { grouped_input_grad_into(dy, w, counts, out.dx); });
    print(
        "weight gradient",
        [&] {
          grouped_quantized_weight_grad(out.g8.columns, out.x8.columns, counts, out.assigned, 1.0);
        },
        [&] { grouped_weight_grad(dy, x, counts, out.assigned, 1.0); });
    std::printf(
        "%-11s casts: input %.3f ms, gradient %.3f ms, weight %.3f ms\n", GetParam().name,
        milliseconds(x, [&] { cast_x({true, false}); }),
        milliseconds(
            x, [&] { quantize_expert_rows(dy, counts, OperandRole::kGradient, options_, kBoth); }),
        milliseconds(x, [&] { quantize_expert_weight(w, options_, kBoth); }));
    if (k > n) continue;
    // n: gate and up of the first product
    const at::Tensor weights = at::rand({rows}, bf16.dtype(at::kFloat));
    const at::Tensor given = at::full({experts}, 16.0f, bf16.dtype(at::kFloat));
    const ExpertScales by{GetParam().scales_known ? given : at::Tensor(), {}};
    const auto in_one = [&] {
      quantized_weighted_activation(dy, weights, {}, counts, options_, kBoth, by);
    };
    const auto in_two = [&] {
      const at::Tensor y = weighted_activation(dy, weights, {});
      for (const bool columns : {false, true})
        quantize_expert_rows(y, counts, OperandRole::kInput, options_, {!columns, columns}, by);
    };
    std::printf("%-11s activation, in one kernel %.3f ms, in two %.3f\n", GetParam().name,
                milliseconds(x, in_one), milliseconds(x, in_two));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, GroupedFp8Gpu,
    ::testing::Values(Recipe{"tensorwise", QuantizationRecipe::kTensorwise, true},
                      Recipe{"delayed", QuantizationRecipe::kDelayed, false, true},
                      Recipe{"blockwise", QuantizationRecipe::kBlockwise, true},
                      Recipe{"blocks_e4m3", QuantizationRecipe::kBlockwise, false}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
