// Attention backends on CUDA against unfused attention in fp64 on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "megatron/tensor/attention/attention.h"
#include "megatron/tensor/attention/attention_block.h"
#include "megatron/tensor/torch.h"
#include "tests/gpu/timing.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

struct AttentionCase {
  const char* name;
  int64_t s, s_k, b, n, g, d;
  bool causal = true;
  int64_t window_left = -1;
  double dropout = 0.0;
  bool sinks = false;
  bool bias = false;    // by distance
  bool masked = false;  // some keys, for all queries of a sample
};

void PrintTo(const AttentionCase& c, std::ostream* out) { *out << c.name; }

using Param = std::tuple<AttentionCase, at::ScalarType, AttentionBackend, bool>;

class GpuAttention : public ::testing::TestWithParam<Param> {};

AttentionOptions make_options(const AttentionCase& c, AttentionBackend backend, bool recompute,
                              const at::Device& device) {
  AttentionOptions o;
  o.causal = c.causal;
  o.scale = 1.0 / std::sqrt(static_cast<double>(c.d));
  o.window_left = c.window_left;
  o.backend = backend;
  o.recompute = recompute;
  if (c.sinks)
    o.sinks = at::linspace(-2, 2, c.n, device == at::kCPU ? at::kDouble : at::kFloat).to(device);
  if (c.bias) {
    at::manual_seed(8);
    o.distance_bias = at::randn({c.s + c.s_k - 1, c.n}).t().to(device);  // as the layers give it
    if (device == at::kCPU) o.distance_bias = o.distance_bias.to(at::kDouble);
  }
  if (c.masked) {
    const at::Tensor keys = at::arange(c.b * c.s_k).view({c.b, 1, 1, c.s_k});
    o.mask = (keys * keys).remainder(7).lt(3).to(device).expand({c.b, 1, c.s, c.s_k});
  }
  if (c.dropout > 0) {
    o.dropout = c.dropout;
    o.key = random_key(1, "attention");
    o.place = {at::arange(c.b).to(device), at::arange(c.s).to(device)};
    o.key_position = at::arange(c.s_k).to(device);
  }
  return o;
}

// out, dq, dk, dv on the CPU.
Tensors attend(Tensors qkv, const at::Tensor& dout, const AttentionOptions& options) {
  for (at::Tensor& t : qkv) t = t.detach().requires_grad_();
  AttentionOptions own = options;
  if (own.sinks.defined()) own.sinks = own.sinks.detach().requires_grad_();
  if (own.distance_bias.defined()) own.distance_bias = own.distance_bias.detach().requires_grad_();
  const at::Tensor out = core_attention(qkv[0], qkv[1], qkv[2], own);
  out.backward(dout);
  Tensors all = {out.detach().cpu(), qkv[0].grad().cpu(), qkv[1].grad().cpu(), qkv[2].grad().cpu()};
  if (own.sinks.defined()) all.push_back(own.sinks.grad().cpu());
  if (own.distance_bias.defined()) all.push_back(own.distance_bias.grad().cpu());
  return all;
}

TEST_P(GpuAttention, MatchesFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const auto& [c, type, backend, recompute] = GetParam();
  const at::Device gpu(at::kCUDA, 0);
  at::manual_seed(3);
  const at::Tensor q = at::randn({c.s, c.b, c.n, c.d}).to(type),
                   kv = at::randn({c.s_k, c.b, c.g, 2 * c.d}).to(type);
  const at::Tensor dout = at::randn({c.s, c.b, c.n, c.d}).to(type), kv_gpu = kv.to(gpu);
  const Tensors here = {q, kv.narrow(3, 0, c.d), kv.narrow(3, c.d, c.d)};
  const Tensors there = {q.to(gpu), kv_gpu.narrow(3, 0, c.d), kv_gpu.narrow(3, c.d, c.d)};
  Tensors wide;
  for (const at::Tensor& t : here) wide.push_back(t.to(at::kDouble));
  const Tensors exact = attend(wide, dout.to(at::kDouble),
                               make_options(c, AttentionBackend::kUnfused, false, at::kCPU));
  Tensors got;
  try {
    got = attend(there, dout.to(gpu), make_options(c, backend, recompute, gpu));
  } catch (const std::exception& error) {
    FAIL() << c.name << " on CUDA threw: " << error.what();
  }
  const double tolerance = type == at::kFloat ? 1e-5 : type == at::kHalf ? 4e-3 : 2e-2;
  const char* const names[] = {"out", "dq", "dk", "dv", c.bias ? "dbias" : "dsinks"};
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LT(relative_error(got[i], exact[i]), tolerance) << names[i] << " of " << c.name;
  }
}

const AttentionCase kCases[] = {
    {"causal", 128, 128, 2, 4, 4, 64},
    {"grouped", 200, 200, 2, 8, 2, 128},
    {"multi_query", 64, 64, 1, 4, 1, 64},
    {"bidirectional", 96, 96, 2, 4, 4, 64, false},
    {"decode", 1, 77, 2, 8, 2, 64},
    {"chunk", 16, 77, 2, 8, 2, 64},
    {"window", 128, 128, 2, 4, 2, 64, true, 17},
    {"dropout", 64, 64, 2, 4, 2, 64, true, -1, 0.2},
    {"odd_head", 33, 33, 2, 2, 2, 20},
    {"wide_head", 64, 64, 1, 2, 2, 192},
    {"bias", 128, 128, 2, 4, 4, 64, false, -1, 0.0, false, true},
    {"bias_causal", 128, 128, 2, 4, 4, 64, true, -1, 0.0, false, true},
    {"bias_odd", 333, 333, 2, 3, 3, 64, false, -1, 0.0, false, true},
    {"bias_odd_causal", 333, 333, 2, 3, 3, 64, true, -1, 0.0, false, true},
    {"bias_cross", 45, 197, 3, 2, 2, 64, false, -1, 0.0, false, true},
    {"bias_wide", 200, 200, 2, 2, 2, 128, false, -1, 0.0, false, true},
    {"bias_wide_causal", 129, 129, 2, 2, 2, 128, true, -1, 0.0, false, true},
    {"bias_dropout", 64, 64, 2, 4, 4, 64, false, -1, 0.2, false, true},
    {"masked", 128, 128, 3, 4, 4, 64, false, -1, 0.0, false, false, true},
    {"masked_cross", 64, 256, 6, 4, 4, 64, false, -1, 0.0, false, false, true},
    {"masked_odd", 45, 104, 3, 2, 2, 40, false, -1, 0.0, false, false, true},
    {"masked_wide", 70, 64, 3, 2, 2, 128, false, -1, 0.0, false, false, true},
    {"masked_groups", 64, 64, 3, 4, 2, 64, false, -1, 0.0, false, false, true},
    {"sinks_window", 128, 128, 2, 8, 2, 64, true, 31, 0.0, true},
    {"sinks", 128, 128, 2, 8, 2, 64, true, -1, 0.0, true},
};

std::string case_name(const ::testing::TestParamInfo<Param>& info) {
  const auto& [c, type, backend, recompute] = info.param;
  const char* const backends[] = {"auto", "flash", "fused", "unfused", "local"};
  return std::string(c.name) + "_" + c10::toString(type) + "_" +
         backends[static_cast<int>(backend)] + (recompute ? "_recompute" : "");
}

INSTANTIATE_TEST_SUITE_P(Auto, GpuAttention,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(at::kBFloat16, at::kHalf, at::kFloat),
                                            ::testing::Values(AttentionBackend::kAuto),
                                            ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(ByName, GpuAttention,
                         ::testing::Combine(::testing::ValuesIn(kCases, kCases + 5),
                                            ::testing::Values(at::kBFloat16),
                                            ::testing::Values(AttentionBackend::kFlash,
                                                              AttentionBackend::kFused,
                                                              AttentionBackend::kUnfused),
                                            ::testing::Values(false)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(SinksByName, GpuAttention,
                         ::testing::Combine(::testing::Values(std::end(kCases)[-1]),
                                            ::testing::Values(at::kBFloat16),
                                            ::testing::Values(AttentionBackend::kFlash,
                                                              AttentionBackend::kFused,
                                                              AttentionBackend::kUnfused),
                                            ::testing::Bool()),
                         case_name);

// Of chunks that read two neighbours of 128 tokens each, beside products and a softmax.
TEST(GpuAttentionMasked, IsBitReproducibleAndFast) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  AttentionCase c{"", 64, 256, 256, 16, 16, 64, false};
  c.masked = true;
  const at::Device gpu(at::kCUDA, 0);
  const auto options = at::dtype(at::kBFloat16).device(gpu);
  at::manual_seed(4);
  const at::Tensor q = at::randn({c.s, c.b, c.n, c.d}, options),
                   kv = at::randn({c.s_k, c.b, c.n, 2 * c.d}, options), dout = at::randn_like(q);
  const Tensors qkv = {q, kv.narrow(3, 0, c.d), kv.narrow(3, c.d, c.d)};
  const auto work = [&](AttentionBackend backend) {
    return [&, o = make_options(c, backend, false, gpu)] {
      Tensors leaves;
      for (const at::Tensor& t : qkv) leaves.push_back(t.detach().requires_grad_());
      core_attention(leaves[0], leaves[1], leaves[2], o).backward(dout);
      return leaves;
    };
  };
  const auto masked = work(AttentionBackend::kAuto);
  const Tensors once = masked(), twice = masked();
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(once[i].grad(), twice[i].grad()));
  const std::vector<double> ms = milliseconds(
      q, {[&] { masked(); }, [&, plain = work(AttentionBackend::kUnfused)] { plain(); }});
  std::printf("masked attention of 256 chunks, forward and backward: %.3f ms, unfused %.3f ms\n",
              ms[0], ms[1]);
  EXPECT_LT(ms[0], ms[1]);
}

// Blocks of keys added up, as a ring of context-parallel ranks does: keys before all queries, then
// a block with keys before the queries and on the diagonal, which flash attention computes as two;
// the late rows of the queries also see a third block.
Tensors attend_in_blocks(const Tensors& qkv, const at::Tensor& dout, AttentionOptions options) {
  const at::Tensor &q = qkv[0], &k = qkv[1], &v = qkv[2];
  const int64_t s = q.size(0), s_k = k.size(0), cut = (s_k - s) / 2, late = s / 2;
  struct Part {
    int64_t first_query, num_queries, first_key, num_keys;
    bool causal;
  };
  // Query i sees keys up to i + s_k - s. The late half meets the keys of the early half's diagonal
  // in full.
  const Part parts[] = {{0, s, 0, cut, false},
                        {0, late, cut, s_k - s - cut + late, true},
                        {late, s - late, cut, s_k - s - cut + late, false},
                        {late, s - late, s_k - s + late, s - late, true}};
  AttentionBlock total{
      at::zeros(q.sizes(), q.options().dtype(at::kFloat)),
      at::full({q.size(1), q.size(2), s}, -INFINITY, q.options().dtype(at::kFloat))};
  for (const Part& p : parts) {
    options.causal = p.causal;
    add_attention_block({total.out.narrow(0, p.first_query, p.num_queries),
                         total.lse.narrow(2, p.first_query, p.num_queries)},
                        attention_block_forward(q.narrow(0, p.first_query, p.num_queries),
                                                k.narrow(0, p.first_key, p.num_keys),
                                                v.narrow(0, p.first_key, p.num_keys), options));
  }
  const at::Tensor out = total.out.to(q.scalar_type());
  at::Tensor dq = at::zeros(q.sizes(), total.out.options()),
             dk = at::zeros(k.sizes(), total.out.options());
  at::Tensor dv = at::zeros_like(dk);
  for (const Part& p : parts) {
    options.causal = p.causal;
    const auto rows = [&](const at::Tensor& t) {
      return t.narrow(0, p.first_query, p.num_queries);
    };
    const auto keys = [&](const at::Tensor& t) { return t.narrow(0, p.first_key, p.num_keys); };
    const auto [dq_part, dk_part, dv_part] =
        attention_block_backward(rows(dout), rows(q), keys(k), keys(v), rows(out),
                                 total.lse.narrow(2, p.first_query, p.num_queries), options);
    rows(dq).add_(dq_part);
    keys(dk).add_(dk_part);
    keys(dv).add_(dv_part);
  }
  return {out.cpu(), dq.cpu(), dk.cpu(), dv.cpu()};
}

TEST(GpuAttentionBlock, BlocksAddUpToFp64) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  for (const auto& [type, tolerance] :
       {std::pair{at::kBFloat16, 2e-2}, {at::kHalf, 4e-3}, {at::kFloat, 1e-5}}) {
    for (const auto& [d, library] : {std::pair{int64_t{64}, AttentionBackend::kFlash},
                                     {64, AttentionBackend::kFused},
                                     {128, AttentionBackend::kFlash},
                                     {128, AttentionBackend::kFused}}) {
      const AttentionCase c{"", 256, 384, 2, 8, 2, d};
      at::manual_seed(3);
      const at::Tensor q = at::randn({c.s, c.b, c.n, d}).to(type),
                       k = at::randn({c.s_k, c.b, c.g, d}).to(type);
      const at::Tensor v = at::randn({c.s_k, c.b, c.g, d}).to(type),
                       dout = at::randn({c.s, c.b, c.n, d}).to(type);
      const Tensors exact =
          attend({q.to(at::kDouble), k.to(at::kDouble), v.to(at::kDouble)}, dout.to(at::kDouble),
                 make_options(c, AttentionBackend::kUnfused, false, at::kCPU));
      // Where the type allows it, the library must take every block: it is asked for by name.
      const auto backend = type == at::kFloat ? AttentionBackend::kAuto : library;
      const AttentionOptions options = make_options(c, backend, false, gpu);
      const Tensors there = {q.to(gpu), k.to(gpu), v.to(gpu)};
      const Tensors got = attend_in_blocks(there, dout.to(gpu), options);
      const Tensors again = attend_in_blocks(there, dout.to(gpu), options);
      const char* const names[] = {"out", "dq", "dk", "dv"};
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_LT(relative_error(got[i], exact[i]), tolerance)
            << names[i] << ", head size " << d << " " << c10::toString(type);
        EXPECT_TRUE(at::equal(got[i], again[i])) << names[i] << " differs between two runs";
      }
    }
  }
}

// Long enough for many blocks to add into one gradient.
TEST(GpuAttentionMode, BackwardIsBitEqualInEveryRun) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  at::manual_seed(3);
  for (const int64_t d : {64, 128}) {
    const at::Tensor q = at::randn({2048, 2, 8, d}).to(gpu, at::kBFloat16),
                     k = at::randn({2048, 2, 2, d}).to(gpu, at::kBFloat16);
    const AttentionOptions options =
        make_options({"", 2048, 2048, 2, 8, 2, d}, AttentionBackend::kAuto, false, gpu);
    const Tensors first = attend({q, k, k}, at::ones_like(q), options);
    for (int run = 0; run < 5; ++run) {
      const Tensors again = attend({q, k, k}, at::ones_like(q), options);
      for (size_t i = 0; i < first.size(); ++i)
        EXPECT_TRUE(at::equal(first[i], again[i])) << "output " << i << ", head size " << d;
    }
  }
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms())
      << "the setting of the process is restored";
}

// Queries, keys and values in one tensor, whose gradients are written into its gradient.
TEST(GpuAttentionMode, BiasByDistanceOfPackedHeads) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  const int64_t s = 150, b = 2, n = 3, d = 64;
  at::manual_seed(3);
  const at::Tensor packed = at::randn({s, b, n * 3 * d}).to(at::kBFloat16),
                   bias = at::randn({n, 2 * s - 1}), dout = at::randn({s, b, n * d});
  const auto run = [&](const at::Device& device, at::ScalarType type) {
    const at::Tensor in = packed.to(device, type).requires_grad_();
    AttentionOptions options;
    options.causal = false;
    options.scale = 0.125;
    options.distance_bias =
        bias.to(device, type == at::kDouble ? at::kDouble : at::kFloat).requires_grad_();
    const at::Tensor out = packed_attention(in.clone(), {n, 1, d}, {}, options);
    out.backward(dout.to(device, type));
    return Tensors{out.detach().cpu(), in.grad().cpu(), options.distance_bias.grad().cpu()};
  };
  const Tensors exact = run(at::kCPU, at::kDouble), got = run(gpu, at::kBFloat16),
                again = run(gpu, at::kBFloat16);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LT(relative_error(got[i], exact[i]), 2e-2) << "result " << i;
    EXPECT_TRUE(at::equal(got[i], again[i])) << "result " << i << ": another run gave other bits";
  }
}

// Times beside what stands in the place of the kernel: attention that stores scores, and cuDNN's
// without a bias.
TEST(GpuAttentionMode, RatesOfABiasByDistance) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  struct Shape {
    int64_t s, b, n, d;
    bool causal;
  };
  for (const Shape& shape : {Shape{512, 32, 16, 64, false}, Shape{128, 32, 16, 64, true},
                             Shape{512, 16, 32, 64, false}, Shape{2048, 4, 16, 128, false}}) {
    const auto [s, b, n, d, causal] = shape;
    const at::Tensor qkv = at::randn({s, b, n, 3 * d}, at::dtype(at::kBFloat16).device(gpu));
    const at::Tensor dout = at::randn({s, b, n, d}, qkv.options());
    const at::Tensor q = qkv.narrow(3, 0, d).detach().requires_grad_(),
                     k = qkv.narrow(3, d, d).detach().requires_grad_(),
                     v = qkv.narrow(3, 2 * d, d).detach().requires_grad_();
    std::vector<std::function<void()>> works;
    for (const auto& [backend, with_bias] : {std::pair{AttentionBackend::kAuto, true},
                                             {AttentionBackend::kAuto, false},
                                             {AttentionBackend::kUnfused, true}}) {
      AttentionOptions options;
      options.causal = causal;
      options.backend = backend;
      options.scale = 1.0 / std::sqrt(static_cast<double>(d));
      if (with_bias)
        options.distance_bias =
            at::randn({n, 2 * s - 1}, at::dtype(at::kFloat).device(gpu)).requires_grad_();
      works.push_back([=] {
        const at::NoGradGuard no_grad;
        core_attention(q, k, v, options);
      });
      works.push_back([=] { core_attention(q, k, v, options).backward(dout); });
    }
    const std::vector<double> times = milliseconds(dout, works);
    const double products = 4.0 * static_cast<double>(b * n * s * s * d) * (causal ? 0.5 : 1.0);
    const char* const names[] = {"bias", "no bias", "unfused, bias"};
    for (size_t i = 0; i < 3; ++i)
      std::printf(
          "s %ld b %ld n %ld d %ld %s: %s %.3f ms (%.0f TFLOP/s), with backward %.3f (%.0f)\n", s,
          b, n, d, causal ? "causal" : "full", names[i], times[2 * i],
          products / times[2 * i] * 1e-9, times[2 * i + 1],
          3.5 * products / times[2 * i + 1] * 1e-9);
  }
}

// A group's scores are too many to differentiate at once (attention_parts): heads go by twos.
TEST(GpuAttentionMode, HeadsOfALongSampleAddUp) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::Device gpu(at::kCUDA, 0);
  at::manual_seed(4);
  const int64_t s = 32768, heads = 4, d = 128;
  ASSERT_EQ(attention_parts(1, heads, 1, s, s, true).heads, 2);
  const auto random = [&](int64_t n) { return at::randn({s, 1, n, d}).to(gpu, at::kBFloat16); };
  const at::Tensor q = random(heads), k = random(1), v = random(1), dout = random(heads);
  const AttentionOptions options =
      make_options({"", s, s, 1, heads, 1, d}, AttentionBackend::kFused, false, gpu);
  const Tensors together = attend({q, k, v}, dout, options);
  at::Tensor dk, dv;
  for (int64_t head = 0; head < heads; ++head) {
    const auto one = [&](const at::Tensor& t) { return t.narrow(2, head, 1).contiguous(); };
    const Tensors alone = attend({one(q), k, v}, one(dout), options);
    EXPECT_TRUE(at::equal(one(together[0]), alone[0])) << "output of head " << head;
    EXPECT_TRUE(at::equal(one(together[1]), alone[1])) << "dq of head " << head;
    dk = head == 0 ? alone[2].to(at::kFloat) : dk + alone[2].to(at::kFloat);
    dv = head == 0 ? alone[3].to(at::kFloat) : dv + alone[3].to(at::kFloat);
  }
  const auto error = [](const at::Tensor& got, const at::Tensor& want) {
    return ((got.to(at::kFloat) - want).norm() / want.norm()).item<double>();
  };
  EXPECT_LT(error(together[2], dk), 4e-3);
  EXPECT_LT(error(together[3], dv), 4e-3);
}

}  // namespace
}  // namespace megatron
