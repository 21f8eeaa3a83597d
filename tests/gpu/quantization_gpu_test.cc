// FP8 GEMMs and linears on a GPU against the same quantised values on the CPU.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <tuple>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/layers.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

at::Tensor draw(at::IntArrayRef shape, uint64_t seed, double scale = 1.0) {
  at::manual_seed(seed);
  return (at::randn(shape) * scale).to(at::kBFloat16);
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor wide = b.detach().to(at::kCPU, at::kDouble);
  const double length = at::linalg_vector_norm(wide, 2).item<double>();
  return at::linalg_vector_norm(a.detach().to(at::kCPU, at::kDouble) - wide, 2).item<double>() /
         length;
}

// The tensor cores add FP8 products with about 14 bits, which are added up in fp32 every 128 or,
// fast, at the end.
constexpr double kFast = 6e-3, kBf16 = 4e-3, kFp32 = 1e-3;

QuantizedMatrix to(const QuantizedMatrix& m, at::Device device) {
  return {m.codes.to(device), m.scale.to(device), m.layout};
}

class Fp8Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(Fp8Gpu, ProductsOfOneScalePerTensor) {
  struct Types {
    at::ScalarType a, b;
  };
  for (const Types types : {Types{at::kFloat8_e4m3fn, at::kFloat8_e4m3fn},
                            Types{at::kFloat8_e5m2, at::kFloat8_e4m3fn}}) {
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
             {16, 16, 16}, {48, 80, 112}, {1024, 768, 512}, {4096, 1536, 2048}}) {
      const QuantizedMatrix a = quantize_tensor(draw({m, k}, 1, 3.0), types.a, {}).rows,
                            b = quantize_tensor(draw({n, k}, 2, 0.02), types.b, {}).rows;
      const at::Tensor bias = draw({n}, 3), start = draw({m, n}, 4).to(at::kFloat);
      const QuantizedMatrix there_a = to(a, kGpu), there_b = to(b, kGpu);
      const std::string what =
          std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
      for (const bool fast : {false, true})
        EXPECT_LT(distance(quantized_product(there_a, there_b, at::kBFloat16, bias.to(kGpu), fast),
                           quantized_product(a, b, at::kBFloat16, bias, fast)),
                  fast ? kFast : kBf16)
            << what;
      const at::Tensor addend = draw({m, n}, 5);
      EXPECT_LT(distance(quantized_product(there_a, there_b, at::kBFloat16, bias.to(kGpu), true,
                                           addend.to(kGpu)),
                         quantized_product(a, b, at::kBFloat16, bias, true, addend)),
                kFast)
          << what;
      at::Tensor target = start.to(kGpu), expected = start.clone();
      for (int i = 0; i < 2; ++i) {
        quantized_product_into(there_a, there_b, target, 1.0);
        quantized_product_into(a, b, expected, 1.0);
      }
      EXPECT_LT(distance(target, expected), kFp32) << what;
      target.fill_(std::nan(""));
      quantized_product_into(there_a, there_b, target, 0.0);
      quantized_product_into(a, b, expected, 0.0);
      EXPECT_LT(distance(target, expected), kFp32) << what << ": beta = 0 must not read the target";
    }
  }
}

TEST_F(Fp8Gpu, ProductsOfOneScalePerRow) {
  for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
           {16, 16, 16}, {48, 80, 112}, {1024, 768, 512}, {4096, 1536, 2048}}) {
    const at::Tensor x = draw({m, k}, 1) * draw({m, 1}, 6).exp(), bias = draw({n}, 3),
                     addend = draw({m, n}, 5);
    const QuantizedMatrix a = quantize_rows(x),
                          b = with_row_scales(
                              quantize_tensor(draw({n, k}, 2), at::kFloat8_e4m3fn, {}).rows),
                          there_a = quantize_rows(x.to(kGpu)), there_b = to(b, kGpu);
    const std::string what = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
    EXPECT_TRUE(at::equal(there_a.codes.cpu().view(at::kByte), a.codes.view(at::kByte))) << what;
    EXPECT_TRUE(at::equal(there_a.scale.cpu(), a.scale)) << what;
    for (const at::Tensor& plus : {at::Tensor(), addend})
      EXPECT_LT(distance(quantized_product(there_a, there_b, at::kBFloat16, bias.to(kGpu), true,
                                           plus.defined() ? plus.to(kGpu) : plus),
                         quantized_product(a, b, at::kBFloat16, bias, true, plus)),
                kFast)
          << what;
  }
}

// Scales of rows are powers of two: applied behind a product that was rounded, or to the input of
// an activation, they round nothing.
TEST_F(Fp8Gpu, FactorsOfRowsAreExact) {
  const int64_t rows = 37, columns = 64;
  const at::Tensor factors = at::exp2(at::arange(rows, at::kFloat).remainder(9) - 4).to(kGpu),
                   y = draw({rows, columns}, 1).to(kGpu), bias = draw({columns}, 2).to(kGpu),
                   addend = draw({rows, columns}, 3).to(kGpu);
  const at::Tensor scaled = y.to(at::kFloat) * factors.unsqueeze(1);
  for (const bool biased : {false, true})
    for (const bool added : {false, true}) {
      const at::Tensor got = y.clone();
      multiply_by_factors(got, factors, biased ? bias : at::Tensor(),
                          added ? addend : at::Tensor());
      at::Tensor expected = scaled;
      if (biased) expected = expected + bias.to(at::kFloat);
      if (added) expected = expected + addend.to(at::kFloat);
      EXPECT_TRUE(at::equal(got, expected.to(y.scalar_type()))) << biased << added;
    }
  const QuantizedMatrix before = quantize_activation_rows(scaled.to(y.scalar_type()),
                                                          Activation::kSwiglu, 0.0),
                        with = quantize_activation_rows(y, Activation::kSwiglu, 0.0, factors);
  EXPECT_TRUE(at::equal(with.codes.view(at::kByte), before.codes.view(at::kByte)));
  EXPECT_TRUE(at::equal(with.scale, before.scale));
}

TEST_F(Fp8Gpu, ProductsOfBlocks) {
  for (const at::ScalarType type : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{
             {128, 128, 128}, {256, 384, 640}, {2048, 1536, 1024}}) {
      const at::Tensor x = draw({m, k}, 1, 3.0) * draw({m, 1}, 5).exp() * draw({1, k}, 6).exp(),
                       w = draw({n, k}, 2, 0.02) * draw({n, 1}, 7).exp();
      const QuantizedMatrix vectors = quantize_blocks(x, type, {}, false).rows,
                            squares = quantize_blocks(w, at::kFloat8_e4m3fn, {}, true).rows,
                            others = quantize_blocks(w, at::kFloat8_e4m3fn, {}, false).rows;
      const std::string what = std::string(c10::toString(type)) + " " + std::to_string(m) + "x" +
                               std::to_string(n) + "x" + std::to_string(k);
      EXPECT_LT(distance(quantized_product(to(vectors, kGpu), to(squares, kGpu), at::kBFloat16, {},
                                           false),
                         quantized_product(vectors, squares, at::kBFloat16, {}, false)),
                kBf16)
          << what;
      at::Tensor target = at::ones({m, n}, at::dtype(at::kFloat).device(kGpu)),
                 expected = at::ones({m, n});
      quantized_product_into(to(vectors, kGpu), to(others, kGpu), target, 1.0);
      quantized_product_into(vectors, others, expected, 1.0);
      EXPECT_LT(distance(target, expected), kFp32) << what;
    }
  }
}

TEST_F(Fp8Gpu, DelayedScalesAreTheCpus) {
  DelayedScalingOptions options;
  for (const int64_t history : {1, 3, 300, 1024}) {
    for (const bool most_recent : {true, false}) {
      options.history_length = history;
      options.most_recent = most_recent;
      options.margin = 1;
      at::Tensor state = at::zeros({6, 1 + history}), there = state.to(kGpu);
      for (int step = 0; step < 8; ++step) {
        at::Tensor amax = at::rand({6}) * (step == 5 ? 0.0 : 10.0), amax_there = amax.to(kGpu);
        update_delayed_scales(state, amax, options);
        update_delayed_scales(there, amax_there, options);
        EXPECT_TRUE(at::equal(there.cpu(), state)) << history << " step " << step;
        EXPECT_EQ(amax_there.abs().max().item<float>(), 0.0f);
      }
    }
  }
}

// The layers with norm and activation inside, in each recipe: y, dx and weight gradients.
TEST_F(Fp8Gpu, LinearsEqualTheCpus) {
  for (const auto recipe : {QuantizationRecipe::kTensorwise, QuantizationRecipe::kDelayed,
                            QuantizationRecipe::kBlockwise}) {
    std::vector<at::Tensor> results[2];
    for (const bool gpu : {false, true}) {
      const at::Device device = gpu ? kGpu : at::Device(at::kCPU);
      const ParallelGroups one;
      LinearOptions first, second;
      first.bias = second.bias = false;
      first.quantization.recipe = second.quantization.recipe = recipe;
      first.quantization.hybrid = second.quantization.hybrid = true;
      first.input_norm = true;
      first.norm.kind = Normalization::kRMSNorm;
      ColumnParallelLinear fc1("fc1", 512, 2048, first, one);
      second.input_activation = Activation::kSwiglu;
      second.recompute_activation = false;
      second.input_from = &fc1;
      RowParallelLinear fc2("fc2", 1024, 512, second, one);
      PlainParameterStore store1(fc1, at::kBFloat16, device, true),
          store2(fc2, at::kBFloat16, device, true);
      uint64_t seed = 10;
      for (Module* module : {static_cast<Module*>(&fc1), static_cast<Module*>(&fc2)})
        for (Parameter* p : module->parameters())
          p->value.copy_(p->local_shape.size() == 2 ? draw(p->local_shape, seed++, 0.05)
                                                    : at::ones(p->local_shape));
      const at::Tensor x = draw({256, 2, 512}, 1).to(device).requires_grad_();
      const at::Tensor y = fc2.forward(fc1.forward(x));
      y.backward(draw({256, 2, 512}, 2, 1e-4).to(device));
      results[gpu ? 1 : 0] = {y, x.grad(), store1.grad(fc1.weight()),
                              store2.grad(*fc2.parameters()[0])};
    }
    // Sums that differ in their last bits round to other codes now and then, by a step of 1/16 of
    // the value.
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_LT(distance(results[1][i], results[0][i]), 1.5e-2)
          << "recipe " << static_cast<int>(recipe) << " result " << i;
  }
}

template <class F>
double microseconds(const at::Tensor& on, const F& work) {
  for (int i = 0; i < 3; ++i) work();
  on.view(-1)[0].item();
  constexpr int kRuns = 30;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) work();
  on.view(-1)[0].item();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
             .count() /
         kRuns;
}

// Prints rates at the sizes of Llama-3-8B, 8192 tokens; no bound, the clock of a machine is its
// own.
TEST_F(Fp8Gpu, Rates) {
  struct Shape {
    const char* name;
    int64_t k, n;
  };
  constexpr int64_t kTokens = 8192;
  for (const Shape s : {Shape{"qkv", 4096, 6144}, Shape{"proj", 4096, 4096},
                        Shape{"fc1", 4096, 28672}, Shape{"fc2", 14336, 4096}}) {
    const at::Tensor x = draw({1024, s.k}, 1).repeat({kTokens / 1024, 1}).to(kGpu),
                     w = draw({s.n, s.k}, 2, 0.02).to(kGpu);
    const at::Tensor dy = draw({1024, s.n}, 3, 1e-4).repeat({kTokens / 1024, 1}).to(kGpu);
    const at::Tensor dw = at::zeros({s.n, s.k}, at::dtype(at::kFloat).device(kGpu));
    const double flop = 2.0 * kTokens * static_cast<double>(s.k) * static_cast<double>(s.n);
    for (const bool blocks : {false, true}) {
      const auto quantize = [&](const at::Tensor& t, bool gradient, bool square) {
        const at::ScalarType type = gradient && !blocks ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
        return blocks ? quantize_blocks(t, type, {}, square)
                      : quantize_tensor(t, type, {}, {.amax = at::ones({1}, dw.options())});
      };
      const QuantizedTensor x8 = quantize(x, false, false), w8 = quantize(w, false, true),
                            g8 = quantize(dy, true, false);
      const double cast = microseconds(dw, [&] { quantize(x, false, false); });
      const double amax = microseconds(dw, [&] { largest_magnitude(x); });
      const double forward = microseconds(
          dw, [&] { quantized_product(x8.rows, w8.rows, at::kBFloat16, {}, !blocks); });
      const double backward = microseconds(
          dw, [&] { quantized_product(g8.rows, w8.columns, at::kBFloat16, {}, false); });
      const double weight =
          microseconds(dw, [&] { quantized_product_into(g8.columns, x8.columns, dw, 1.0); });
      std::printf(
          "%-5s %-10s cast %6.1f us %5.0f GB/s  amax %6.1f us %5.0f GB/s  TFLOP/s forward %5.0f "
          "input gradient %5.0f weight gradient %5.0f\n",
          s.name, blocks ? "blocks" : "tensor", cast,
          4e-3 * kTokens * static_cast<double>(s.k) / cast, amax,
          2e-3 * kTokens * static_cast<double>(s.k) / amax, flop / forward * 1e-6,
          flop / backward * 1e-6, flop / weight * 1e-6);
    }
  }
}

// Every code of E4M3, subnormal ones too, times powers of two far apart: exact.
TEST_F(Fp8Gpu, FewRowsKnowEveryCode) {
  constexpr int64_t kColumns = 1024, kInner = 512;
  const at::Tensor bytes = at::arange(kColumns * kInner, at::kLong).remainder(256).to(at::kByte);
  bytes.index_fill_(0, (bytes.bitwise_and(127) == 127).nonzero().squeeze(1), 8);  // no NaN
  const QuantizedMatrix codes{bytes.view({kColumns, kInner}).view(at::kFloat8_e4m3fn).to(kGpu),
                              at::ones({kFp8ScaleElements}, at::dtype(at::kFloat).device(kGpu)),
                              ScaleLayout::kTensor};
  const at::Tensor values = codes.codes.to(at::kFloat);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (const double size : {1.0, 1024.0, 0x1p-14}) {
      const at::Tensor x = at::zeros({1, kInner}, at::dtype(type).device(kGpu)),
                       y = at::empty({1, kColumns}, x.options());
      for (int64_t k = 0; k < kInner; k += 37) {
        x.zero_();
        x[0][k] = size;
        ASSERT_TRUE(multiply_few_rows(x, codes, {}, {}, y, false));
        const at::Tensor expected = (values.select(1, k) * size).to(type);
        EXPECT_TRUE(at::equal(y[0], expected)) << toString(type) << " " << size << " " << k;
      }
    }
}

struct FewRowsOfCodes {
  int64_t rows, n, k;
  bool blocks, norm, swiglu, added;
};

void expect_few_rows(const FewRowsOfCodes& c) {
  const std::string name = cat(c.rows, " rows of ", c.n, " x ", c.k, c.blocks ? " blocks" : "",
                               c.norm ? " norm" : "", c.swiglu ? " swiglu" : "");
  const at::Tensor w = draw({c.n, c.k}, 1, 0.05).to(kGpu), gain = draw({c.k}, 4).to(kGpu);
  // One element is far larger than the others, and some are far smaller.
  const at::Tensor x = draw({c.rows, c.k}, 2).to(kGpu);
  x.select(1, 5).mul_(3000.0);
  x.narrow(1, 16, 8).mul_(1e-6);
  const QuantizedMatrix codes =
      c.blocks ? quantize_blocks(w, at::kFloat8_e4m3fn, {}, true).rows
               : quantize_tensor(w, at::kFloat8_e4m3fn, {}, {.amax = largest_magnitude(w)}).rows;
  const int64_t columns = c.swiglu ? c.n / 2 : c.n;
  const at::Tensor bias = c.added ? draw({columns}, 5).to(kGpu) : at::Tensor(),
                   addend = c.added ? draw({c.rows, columns}, 6).to(kGpu) : at::Tensor(),
                   y = at::empty({c.rows, columns}, x.options());
  AroundProduct around;
  if (c.norm) around.gain = gain;
  around.eps = 1e-5;
  around.swiglu = c.swiglu;
  ASSERT_TRUE(multiply_few_rows(x, codes, bias, addend, y, /*at_rest=*/false, around)) << name;
  at::Tensor rows = x.to(at::kFloat);
  if (c.norm)
    rows = (rows * (rows.square().mean(1, true) + 1e-5).rsqrt() * gain.to(at::kFloat))
               .to(at::kBFloat16)
               .to(at::kFloat);
  at::Tensor expected = at::mm(rows.to(at::kDouble), dequantize(codes).to(at::kDouble).t());
  if (c.swiglu) {
    const auto rounded = expected.to(at::kBFloat16).to(at::kDouble).chunk(2, 1);
    expected = at::silu(rounded[0]) * rounded[1];
  }
  if (c.added) expected = expected + bias + addend;
  for (int64_t r = 0; r < c.rows; ++r) EXPECT_LT(distance(y[r], expected[r]), 3e-3) << name;
}

TEST_F(Fp8Gpu, FewRowsMultiplyCodesByRowsThatAreNotRounded) {
  for (const bool blocks : {false, true}) {
    for (int64_t rows = 1; rows <= 4; ++rows) {
      expect_few_rows({rows, 6144, 4096, blocks, true, false, false});
      expect_few_rows({rows, 28672, 4096, blocks, true, true, false});
      expect_few_rows({rows, 4096, 4096, blocks, false, false, true});
      expect_few_rows({rows, 768, 1152, blocks, rows % 2 == 0, false, true});
      expect_few_rows({rows, 1536, 768, blocks, false, true, false});
    }
    expect_few_rows({2, 4096, 14336, blocks, false, false, true});
  }
  expect_few_rows({3, 720, 1040, false, true, false, true});
}

TEST_F(Fp8Gpu, RatesOfFewRows) {
  for (const auto& [n, k, swiglu] : std::vector<std::tuple<int64_t, int64_t, bool>>{
           {6144, 4096, false}, {4096, 4096, false}, {28672, 4096, true}, {4096, 14336, false}}) {
    const at::Tensor x = draw({1, k}, 2).to(kGpu),
                     y = at::empty({1, swiglu ? n / 2 : n}, x.options());
    std::vector<QuantizedMatrix> codes;  // more than the L2 cache holds
    std::vector<at::Tensor> weights;
    for (int64_t i = 0; i < 1 + 200'000'000 / (n * k); ++i) {
      weights.push_back(at::randn({n, k}, x.options()));
      codes.push_back(quantize_tensor(weights.back(), at::kFloat8_e4m3fn, {},
                                      {.amax = largest_magnitude(weights.back())})
                          .rows);
    }
    AroundProduct around;
    around.swiglu = swiglu;
    const auto each = static_cast<double>(codes.size());
    const double in_fp8 = microseconds(y,
                                       [&] {
                                         for (const QuantizedMatrix& m : codes)
                                           multiply_few_rows(x, m, {}, {}, y, true, around);
                                       }) /
                          each;
    const double in_bf16 = microseconds(y,
                                        [&] {
                                          for (const at::Tensor& m : weights)
                                            multiply_few_rows(x, m, {}, {}, y, true, around);
                                        }) /
                           each;
    std::printf("%5ld x %5ld  fp8 %6.2f us %5.0f GB/s   bf16 %6.2f us %5.0f GB/s\n", n, k, in_fp8,
                1e-3 * static_cast<double>(n * k) / in_fp8, in_bf16,
                2e-3 * static_cast<double>(n * k) / in_bf16);
  }
}

}  // namespace
}  // namespace megatron
