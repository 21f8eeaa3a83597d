// Kernels of state-space layers on a GPU: held against the tensor operations in fp64, with borders
// of documents anywhere and lengths that no chunk divides; the same bits again; and their times.
#include <gtest/gtest.h>

#include <cstdio>

#include "megatron/base/check.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/causal_conv.h"
#include "megatron/transformer/ssm/gated_delta.h"
#include "megatron/transformer/ssm/gated_norm.h"
#include "megatron/transformer/ssm/normed_gate.h"
#include "megatron/transformer/ssm/ssd_scan.h"
#include "tests/gpu/timing.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);
// Of the norm of what is exact: twice what rounding a result to bf16 takes, which is all that
// tensor operations lose.
constexpr double kTolerance = 3.4e-3;

class SsmGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    at::manual_seed(5);
  }
};

at::Tensor draw(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); }
at::Tensor wide(const at::Tensor& t) { return t.defined() ? t.cpu().to(at::kDouble) : t; }
at::Tensor there(const at::Tensor& t) { return t.defined() ? t.to(kGpu) : t; }

bool has_kernel(const ScanOperands& o) {
  return ssm_kernels::ssd_scan({o.x, o.dt, o.A, o.B, o.C, o.D, o.runs}).has_value();
}

// Documents of about `length` tokens, [s, b].
at::Tensor draw_runs(int64_t s, int64_t b, int64_t length) {
  return at::rand({s, b}).lt(1.0 / static_cast<double>(length)).to(at::kLong).cumsum(0);
}

void expect_close(const at::Tensor& got, const at::Tensor& exact, const char* name,
                  double tolerance = kTolerance) {
  ASSERT_TRUE(got.defined()) << name;
  ASSERT_EQ(got.sizes(), exact.sizes()) << name;
  const at::Tensor difference = got.cpu().to(at::kDouble) - exact;
  EXPECT_LT((difference.norm() / exact.norm()).item<double>(), tolerance) << name;
}

TEST_F(SsmGpu, ConvolutionOfNoSamplesHasZeroGradients) {
  const at::Tensor u = draw({8, 0, 64}), weight = draw({64, 1, 4}), bias = draw({64});
  const CausalConvGrads grads =
      causal_conv_backward(there(u), there(u), there(weight), there(bias));
  EXPECT_EQ(grads.u.numel(), 0);
  EXPECT_TRUE(grads.weight.eq(0).all().item<bool>());
  EXPECT_TRUE(grads.bias.eq(0).all().item<bool>());
}

// The last is divided into runs of a length that fills the device.
TEST_F(SsmGpu, ConvolutionMatchesFp64) {
  for (const auto& [s, b, channels, width] : {std::array<int64_t, 4>{300, 2, 64, 4},
                                              {129, 1, 136, 4},
                                              {5, 3, 72, 3},
                                              {640, 1, 40, 2},
                                              {2048, 1, 16384, 4}}) {
    for (const bool with_before : {false, true}) {
      // A slice of wider rows.
      const at::Tensor u = draw({s, b, channels + 16}).narrow(2, 8, channels),
                       weight = draw({channels, 1, width}), bias = draw({channels}),
                       dy = draw({s, b, channels}), runs = draw_runs(s, b, 7);
      ConvBorders borders{.runs = runs}, exact_borders{.runs = runs};
      if (with_before) {
        borders.before = draw({width - 1, b, channels});
        borders.runs_before = runs.narrow(0, 0, 1).expand({width - 1, b});
        exact_borders = {wide(borders.before), runs, borders.runs_before};
      }
      const ConvBorders on_gpu{there(borders.before), there(borders.runs),
                               there(borders.runs_before)};
      const auto y =
          ssm_kernels::causal_conv({there(u), there(weight), there(bias), there(borders.before),
                                    there(borders.runs), there(borders.runs_before)});
      ASSERT_TRUE(y);
      const CausalConvGrads grads =
          causal_conv_backward(there(dy), there(u), there(weight), there(bias), on_gpu);
      EXPECT_TRUE(at::equal(*y, causal_conv(there(u), there(weight), there(bias), on_gpu)));
      const CausalConvGrads exact =
          causal_conv_backward(wide(dy), wide(u), wide(weight), wide(bias), exact_borders);
      expect_close(*y, causal_conv(wide(u), wide(weight), wide(bias), exact_borders), "y");
      expect_close(grads.u, exact.u, "du");
      expect_close(grads.weight, exact.weight, "dweight", 1e-5);
      expect_close(grads.bias, exact.bias, "dbias", 1e-5);
      if (with_before) expect_close(grads.before, exact.before, "dbefore");
    }
  }
}

TEST_F(SsmGpu, GatedNormMatchesFp64) {
  for (const auto& [s, b, groups, size] : {std::array<int64_t, 4>{50, 2, 2, 1024},
                                           {30, 1, 1, 5120},
                                           {77, 1, 8, 64},
                                           {33, 2, 3, 128}}) {
    const at::Tensor y = draw({s, b, groups * size}),
                     z = draw({s, b, groups * size + 24}).narrow(2, 0, groups * size),
                     w = (1 + 0.1 * at::randn({groups * size})).to(at::kBFloat16),
                     dout = draw({s, b, groups * size});
    const NormGroups norm{.count = groups};
    ASSERT_TRUE(ssm_kernels::gated_norm({there(y), there(z), there(w)}, groups, norm.eps));
    const GatedNormResult result = gated_norm(there(y), there(z), there(w), norm);
    const GatedNormGrads grads =
        gated_norm_backward(there(dout), there(y), there(z), there(w), result.rstd, norm);
    const GatedNormResult exact = gated_norm(wide(y), wide(z), wide(w), norm);
    const GatedNormGrads exact_grads =
        gated_norm_backward(wide(dout), wide(y), wide(z), wide(w), exact.rstd, norm);
    expect_close(result.o, exact.o, "o");
    expect_close(result.rstd, exact.rstd, "rstd", 1e-5);
    expect_close(grads.y, exact_grads.y, "dy");
    expect_close(grads.z, exact_grads.z, "dz");
    expect_close(grads.w, exact_grads.w, "dw", 1e-5);
    EXPECT_TRUE(at::equal(gated_norm_apply(there(y), there(z), there(w), result.rstd), result.o))
        << "recomputed outputs have other bits";
  }
}

struct ScanCase {
  int64_t s, b, heads, groups, head_size, state, document;  // document: mean length, 0: one
  bool initial;
};

struct ScanInputs {
  ScanOperands operands;
  ScanState initial;
  at::Tensor dy, dstate;
};

ScanInputs draw_scan(const ScanCase& c) {
  ScanInputs in;
  // As slices of what the convolution gives.
  const int64_t width = c.heads * c.head_size, states = c.groups * c.state;
  const at::Tensor row = draw({c.s, c.b, width + 2 * states});
  in.operands.x = row.narrow(2, 0, width).unflatten(2, {c.heads, c.head_size});
  in.operands.B = row.narrow(2, width, states).unflatten(2, {c.groups, c.state});
  in.operands.C = row.narrow(2, width + states, states).unflatten(2, {c.groups, c.state});
  in.operands.dt = at::softplus(at::randn({c.s, c.b, c.heads}) - 2);
  in.operands.A = -at::linspace(1, 16, c.heads);
  in.operands.D = 1 + 0.3 * at::randn({c.heads});
  in.dy = draw({c.s, c.b, c.heads, c.head_size});
  if (c.document > 0) in.operands.runs = draw_runs(c.s, c.b, c.document);
  if (c.initial) {
    in.initial.state = at::randn({c.b, c.heads, c.head_size, c.state});
    in.dstate = at::randn({c.b, c.heads, c.head_size, c.state});
  }
  return in;
}
ScanInputs moved(const ScanInputs& in, at::Tensor (*move)(const at::Tensor&)) {
  const ScanOperands& o = in.operands;
  return {{move(o.x), move(o.dt), move(o.A), move(o.B), move(o.C), move(o.D), o.runs},
          {move(in.initial.state), {}},
          move(in.dy),
          move(in.dstate)};
}
ScanInputs on_gpu(const ScanInputs& in) {
  ScanInputs out = moved(in, there);
  out.operands.runs = there(in.operands.runs);
  return out;
}

const ScanCase kScans[] = {{256, 1, 16, 2, 64, 128, 0, false},  {333, 2, 8, 2, 64, 128, 30, true},
                           {700, 3, 4, 1, 64, 128, 5, true},    {200, 1, 4, 1, 128, 128, 300, true},
                           {555, 2, 4, 2, 64, 64, 100, true},   {555, 2, 4, 2, 64, 256, 100, true},
                           {65, 1, 3, 3, 64, 128, 0, true},     {1, 2, 4, 2, 64, 128, 0, true},
                           {8192, 1, 2, 1, 64, 128, 1000, true}};

TEST_F(SsmGpu, ScanMatchesFp64) {
  for (const ScanCase& c : kScans) {
    SCOPED_TRACE(cat(c.s, " tokens, heads of ", c.head_size, ", states of ", c.state));
    const ScanInputs in = draw_scan(c), gpu = on_gpu(in), exact_in = moved(in, wide);
    if (!has_kernel(gpu.operands)) GTEST_SKIP() << "the scan's kernel needs a Hopper GPU";
    const ScanResult result = ssd_scan(gpu.operands, gpu.initial, 128);
    const ScanResult exact = ssd_scan(exact_in.operands, exact_in.initial, 128);
    expect_close(result.y, exact.y, "y");
    expect_close(result.state, exact.state, "state");
    const ScanResult again = ssd_scan(gpu.operands, gpu.initial, 128);
    EXPECT_TRUE(at::equal(result.y, again.y)) << "another run gave other bits";
  }
}

TEST_F(SsmGpu, GradientsOfTheScanMatchFp64) {
  for (const ScanCase& c : kScans) {
    if (c.state == 256) continue;
    SCOPED_TRACE(cat(c.s, " tokens, heads of ", c.head_size, ", states of ", c.state));
    const ScanInputs in = draw_scan(c), gpu = on_gpu(in), exact_in = moved(in, wide);
    if (!has_kernel(gpu.operands)) GTEST_SKIP() << "the scan's kernel needs a Hopper GPU";
    const auto run = [](const ScanInputs& i) {
      return ssd_scan_backward(i.dy, i.dstate, i.operands, i.initial, 128);
    };
    const ScanGrads got = run(gpu), again = run(gpu), exact = run(exact_in);
    expect_close(got.x, exact.x, "dx");
    expect_close(got.B, exact.B, "dB");
    expect_close(got.C, exact.C, "dC");
    // Of one token: eight sums of terms of both signs, too few for a norm to average.
    expect_close(got.dt, exact.dt, "ddt", c.s == 1 ? 2 * kTolerance : kTolerance);
    expect_close(got.D, exact.D, "dD", 1e-5);
    expect_close(got.state, exact.state, "dstate");
    // A sum of terms of both signs, that may be far larger than it is.
    expect_close(got.A, exact.A, "dA", 5e-2);
    EXPECT_TRUE(at::equal(got.B, again.B) && at::equal(got.dt, again.dt) &&
                at::equal(got.A, again.A))
        << "another run gave other bits";
  }
}

// A part of a sequence as a map of states, as context parallelism composes them.
TEST_F(SsmGpu, StatesOfAPartMatchFp64) {
  const ScanInputs in = draw_scan({333, 2, 8, 2, 64, 128, 30, false}), gpu = on_gpu(in),
                   exact = moved(in, wide);
  if (!has_kernel(gpu.operands)) GTEST_SKIP() << "the scan's kernel needs a Hopper GPU";
  for (const bool another : {false, true}) {  // document before the part
    const at::Tensor run = in.operands.runs[0] - (another ? 1 : 0);
    expect_close(ssd_state(gpu.operands, there(run), 128), ssd_state(exact.operands, run, 128),
                 "state");
    const at::Tensor got = ssd_state_grad(gpu.dy, gpu.operands, there(run), 128),
                     want = ssd_state_grad(exact.dy, exact.operands, run, 128);
    if (another) {
      EXPECT_EQ(got.abs().max().item<double>(), 0);
    } else {
      expect_close(got, want, "gradient of the state before");
    }
  }
}

// The state that enters belongs to a document that ended before.
TEST_F(SsmGpu, ScanForgetsTheStateOfAnotherDocument) {
  const ScanCase c{100, 2, 4, 2, 64, 128, 40, true};
  ScanInputs in = draw_scan(c);
  in.initial.run = in.operands.runs[0] - 1;
  ScanInputs gpu = on_gpu(in);
  gpu.initial.run = there(in.initial.run);
  if (!has_kernel(gpu.operands)) GTEST_SKIP() << "the scan's kernel needs a Hopper GPU";
  const ScanResult result = ssd_scan(gpu.operands, gpu.initial, 128);
  gpu.initial = {};
  const ScanResult without = ssd_scan(gpu.operands, gpu.initial, 128);
  EXPECT_TRUE(at::equal(result.y, without.y));
  EXPECT_TRUE(at::equal(result.state, without.state));
}

TEST_F(SsmGpu, StepMatchesFp64) {
  for (const int64_t state : {64, 128, 256}) {
    const ScanInputs in = draw_scan({1, 5, 8, 2, 64, state, 0, true}), gpu = on_gpu(in),
                     exact_in = moved(in, wide);
    const ScanResult result = ssd_steps(gpu.operands, gpu.initial);
    const ScanResult exact = ssd_steps(exact_in.operands, exact_in.initial);
    expect_close(result.y, exact.y, "y");
    expect_close(result.state, exact.state, "state", 1e-5);
  }
}

struct DeltaCase {
  int64_t s, b, key_heads, value_heads, key_size, value_size, document;  // as ScanCase
  bool initial;
  double decay;  // the scale of g
};
struct DeltaInputs {
  DeltaOperands operands;
  ScanState initial;
  at::Tensor grad, dstate;
};

DeltaInputs draw_delta(const DeltaCase& c) {
  DeltaInputs in;
  const auto unit = [&](const at::Tensor& x) {
    return unit_length(x.to(at::kDouble)).to(at::kBFloat16);
  };
  in.operands.q = unit(draw({c.s, c.b, c.key_heads, c.key_size}));
  // Keys that look alike, so that the inverse of a chunk has something to do.
  in.operands.k = unit(draw({c.s, c.b, c.key_heads, c.key_size}) +
                       0.7 * draw({1, c.b, c.key_heads, c.key_size}));
  // A slice of wider rows.
  const int64_t width = c.value_heads * c.value_size;
  in.operands.v =
      draw({c.s, c.b, width + 64}).narrow(2, 64, width).unflatten(2, {c.value_heads, c.value_size});
  in.operands.g = -c.decay * at::softplus(1.5 * at::randn({c.s, c.b, c.value_heads}) - 1);
  in.operands.beta = at::sigmoid(1.5 * at::randn({c.s, c.b, c.value_heads}));
  in.grad = draw({c.s, c.b, c.value_heads, c.value_size});
  if (c.document > 0) in.operands.runs = draw_runs(c.s, c.b, c.document);
  if (c.initial) {
    in.initial.state = 0.3 * at::randn({c.b, c.value_heads, c.key_size, c.value_size});
    in.dstate = 0.3 * at::randn({c.b, c.value_heads, c.key_size, c.value_size});
  }
  return in;
}
DeltaInputs moved(const DeltaInputs& in, at::Tensor (*move)(const at::Tensor&),
                  const at::Tensor& runs) {
  const DeltaOperands& o = in.operands;
  return {{move(o.q), move(o.k), move(o.v), move(o.g), move(o.beta), runs},
          {move(in.initial.state), {}},
          move(in.grad),
          move(in.dstate)};
}

const DeltaCase kDeltas[] = {
    {256, 1, 4, 8, 128, 128, 0, false, 1.0},  {333, 2, 2, 4, 128, 128, 30, true, 1.0},
    {300, 1, 1, 2, 128, 128, 4, true, 1.0},   {200, 2, 2, 4, 64, 64, 60, true, 1.0},
    {1, 2, 1, 2, 128, 128, 0, true, 1.0},     {200, 1, 2, 2, 128, 64, 60, true, 1.0},
    {256, 1, 1, 2, 128, 128, 0, true, 30.0},  {130, 1, 1, 3, 64, 128, 0, true, 0.01},
    {2048, 1, 1, 2, 128, 128, 300, true, 0.1}};
// What is multiplied is rounded four times in a row: the inverse, W and U, E, the state.
constexpr double kDeltaTolerance = 1e-2;

TEST_F(SsmGpu, DeltaRuleMatchesFp64) {
  for (const DeltaCase& c : kDeltas) {
    SCOPED_TRACE(cat(c.s, " tokens, keys of ", c.key_size, ", values of ", c.value_size));
    const DeltaInputs in = draw_delta(c), gpu = moved(in, there, there(in.operands.runs)),
                      exact_in = moved(in, wide, in.operands.runs);
    const DeltaOperands& o = gpu.operands;
    if (!ssm_kernels::delta_rule({o.q, o.k, o.v, o.g, o.beta, o.runs}))
      GTEST_SKIP() << "the rule's kernel needs a Hopper GPU";
    const DeltaResult result = delta_rule(o, gpu.initial, 64);
    const DeltaResult exact = delta_rule(exact_in.operands, exact_in.initial, 64);
    expect_close(result.o, exact.o, "o", kDeltaTolerance);
    expect_close(result.state, exact.state, "state", kDeltaTolerance);
    const DeltaResult again = delta_rule(o, gpu.initial, 64);
    EXPECT_TRUE(at::equal(result.o, again.o) && at::equal(result.state, again.state))
        << "another run gave other bits";
  }
}

TEST_F(SsmGpu, GradientsOfTheDeltaRuleMatchFp64) {
  for (const DeltaCase& c : kDeltas) {
    if (c.key_size != c.value_size) continue;
    SCOPED_TRACE(cat(c.s, " tokens, keys and values of ", c.key_size));
    const DeltaInputs in = draw_delta(c), gpu = moved(in, there, there(in.operands.runs)),
                      exact_in = moved(in, wide, in.operands.runs);
    const DeltaOperands& o = gpu.operands;
    if (!ssm_kernels::delta_rule_backward(gpu.grad, gpu.dstate,
                                          {o.q, o.k, o.v, o.g, o.beta, o.runs}))
      GTEST_SKIP() << "the rule's kernel needs a Hopper GPU";
    const auto run = [](const DeltaInputs& i) {
      return delta_rule_backward(i.grad, i.dstate, i.operands, i.initial, 64);
    };
    const DeltaGrads got = run(gpu), again = run(gpu), exact = run(exact_in);
    expect_close(got.q, exact.q, "dq", kDeltaTolerance);
    expect_close(got.k, exact.k, "dk", kDeltaTolerance);
    expect_close(got.v, exact.v, "dv", kDeltaTolerance);
    expect_close(got.beta, exact.beta, "dbeta", kDeltaTolerance);
    expect_close(got.g, exact.g, "dg", 2 * kDeltaTolerance);
    expect_close(got.state, exact.state, "dstate", kDeltaTolerance);
    EXPECT_TRUE(at::equal(got.k, again.k) && at::equal(got.g, again.g) &&
                at::equal(got.beta, again.beta))
        << "another run gave other bits";
  }
}

// What a token becomes depends in no bit on how many follow it in its chunk.
TEST_F(SsmGpu, DeltaRuleOfAPrefixHasTheSameBits) {
  const DeltaInputs in = draw_delta({200, 2, 2, 4, 128, 128, 50, true, 1.0});
  const DeltaInputs gpu = moved(in, there, there(in.operands.runs));
  const DeltaOperands& o = gpu.operands;
  if (!ssm_kernels::delta_rule({o.q, o.k, o.v, o.g, o.beta, o.runs}))
    GTEST_SKIP() << "the rule's kernel needs a Hopper GPU";
  const at::Tensor whole = delta_rule(o, gpu.initial, 64).o;
  for (const int64_t rows : {1, 64, 77, 130}) {
    const auto first = [&](const at::Tensor& t) { return t.narrow(0, 0, rows); };
    const DeltaOperands part{first(o.q), first(o.k),    first(o.v),
                             first(o.g), first(o.beta), first(o.runs)};
    EXPECT_TRUE(at::equal(delta_rule(part, gpu.initial, 64).o, first(whole))) << rows;
  }
}

TEST_F(SsmGpu, HeadsOfLengthOneMatchFp64) {
  for (const int64_t size : {64, 128}) {
    const at::Tensor
        x = draw({77, 2, 3 * size + 40}).narrow(2, 8, 3 * size).unflatten(2, {3, size}),
        grad = draw({77, 2, 3, size});
    if (!ssm_kernels::unit_length(there(x))) GTEST_SKIP() << "the rule needs a Hopper GPU";
    expect_close(unit_length(there(x)), unit_length(wide(x)), "y");
    expect_close(unit_length_backward(there(grad), there(x)),
                 unit_length_backward(wide(grad), wide(x)), "dx");
  }
}

TEST_F(SsmGpu, NormedGateMatchesFp64) {
  for (const int64_t size : {24, 64, 128}) {
    const at::Tensor
        y = draw({50, 2, 6, size}),
        z = draw({50, 2, 6 * size + 24}).narrow(2, 0, 6 * size).unflatten(2, {6, size}),
        w = (1 + 0.1 * at::randn({size})).to(at::kBFloat16), grad = draw({50, 2, 6, size});
    ASSERT_TRUE(ssm_kernels::normed_gate({there(y), there(z), there(w)}, 1e-6));
    const NormedGateResult result = normed_gate(there(y), there(z), there(w), 1e-6);
    const NormedGateResult exact = normed_gate(wide(y), wide(z), wide(w), 1e-6);
    const NormedGateGrads grads =
        normed_gate_backward(there(grad), there(y), there(z), there(w), result.rstd);
    const NormedGateGrads exact_grads =
        normed_gate_backward(wide(grad), wide(y), wide(z), wide(w), exact.rstd);
    expect_close(result.o, exact.o, "o");
    expect_close(result.rstd, exact.rstd, "rstd", 1e-5);
    expect_close(grads.y, exact_grads.y, "dy");
    expect_close(grads.z, exact_grads.z, "dz");
    expect_close(grads.w, exact_grads.w, "dw", 1e-5);
    EXPECT_TRUE(at::equal(normed_gate_apply(there(y), there(z), there(w), result.rstd), result.o))
        << "recomputed outputs have other bits";
  }
}

// Of a layer of Nemotron-H 8B, and of a gated delta net with 16 and 32 heads of 128, beside a copy
// of as many bytes as each reads and writes.
TEST_F(SsmGpu, Rates) {
  const int64_t s = 8192;
  const ScanInputs in = on_gpu(draw_scan({s, 1, 128, 8, 64, 128, 0, false}));
  const DeltaInputs delta = moved(draw_delta({s, 1, 16, 32, 128, 128, 0, false, 1.0}), there, {});
  const at::Tensor u = draw({s, 1, 10240}).to(kGpu), weight = draw({10240, 1, 4}).to(kGpu),
                   bias = draw({10240}).to(kGpu), y = draw({s, 1, 8192}).to(kGpu),
                   z = draw({s, 1, 8192}).to(kGpu), w = draw({8192}).to(kGpu),
                   rstd = at::ones({s, 1, 8}, at::dtype(at::kFloat).device(kGpu)),
                   ys = draw({s, 1, 32, 128}).to(kGpu), zs = draw({s, 1, 32, 128}).to(kGpu),
                   ws = draw({128}).to(kGpu),
                   rstds = at::ones({s, 1, 32}, at::dtype(at::kFloat).device(kGpu)),
                   from = at::empty({1 << 28}, u.options()), to = at::empty_like(from);
  const NormGroups groups{.count = 8};
  const std::vector<double> times = milliseconds(
      to,
      {[&] { to.copy_(from); }, [&] { ssd_scan(in.operands, {}, 128); },
       [&] { ssd_scan_backward(in.dy, {}, in.operands, {}, 128); },
       [&] { causal_conv(u, weight, bias); }, [&] { causal_conv_backward(u, u, weight, bias); },
       [&] { gated_norm(y, z, w, groups); }, [&] { gated_norm_backward(y, y, z, w, rstd, groups); },
       [&] { normed_gate(ys, zs, ws, 1e-6); }, [&] { normed_gate_backward(ys, ys, zs, ws, rstds); },
       [&] { delta_rule(delta.operands, {}, 64); },
       [&] { delta_rule_backward(delta.grad, {}, delta.operands, {}, 64); }});
  const double copied = 4.0 * (1 << 28) / times[0];  // bytes in a millisecond
  const char* const names[] = {"copy",         "scan",       "its backward", "convolution",
                               "its backward", "norm",       "its backward", "norm and gate",
                               "its backward", "delta rule", "its backward"};
  const double bytes[] = {0, 37120, 58112, 40960, 61440, 49152, 81920, 24576, 40960, 24832, 41472};
  for (size_t i = 1; i < times.size(); ++i)
    std::printf("%s %.1f ns a token, %.0f%% of the copy rate\n", names[i],
                times[i] * 1e6 / static_cast<double>(s),
                100 * bytes[i] * static_cast<double>(s) / times[i] / copied);
}

}  // namespace
}  // namespace megatron
