#include "megatron/tensor/attention/attention.h"

#include <array>
#include <cmath>

#include "megatron/base/check.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

// softmax(q k^T scale + mask) v in fp64 through ATen's autograd; `allowed` [.., s, s_k] bool.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& allowed, double scale, const at::Tensor& keep = {},
                     double softcap = 0.0, const at::Tensor& sinks = {},
                     const at::Tensor& bias = {}) {
  const int64_t r = q.size(2) / k.size(2);
  const at::Tensor queries = q.permute({1, 2, 0, 3});
  const at::Tensor keys = k.repeat_interleave(r, 2).permute({1, 2, 3, 0});
  const at::Tensor values = v.repeat_interleave(r, 2).permute({1, 2, 0, 3});
  at::Tensor scores = at::matmul(queries, keys) * scale;
  if (softcap > 0) scores = softcap * at::tanh(scores / softcap);
  if (bias.defined()) {
    const int64_t s = q.size(0), s_k = k.size(0);
    const at::Tensor place = at::arange(s_k).unsqueeze(0) - at::arange(s).unsqueeze(1) + s - 1;
    scores = scores + bias.index_select(1, place.flatten()).view({-1, s, s_k});
  }
  at::Tensor weights = at::exp(scores) * allowed;
  at::Tensor sum = weights.sum(-1, true);
  if (sinks.defined()) sum = sum + at::exp(sinks).view({1, -1, 1, 1});
  at::Tensor probs = weights / sum.clamp_min(1e-300);
  if (keep.defined()) probs = probs * keep;
  return at::matmul(probs, values).permute({2, 0, 1, 3});
}

at::Tensor allowed_keys(int64_t s, int64_t s_k, bool causal, int64_t left, int64_t right) {
  const at::Tensor ahead = at::arange(s_k).unsqueeze(0) - at::arange(s).unsqueeze(1) - (s_k - s);
  at::Tensor allowed = at::ones({s, s_k}, at::kBool);
  if (causal) allowed = allowed & (ahead <= 0);
  if (left >= 0) allowed = allowed & (ahead >= -left);
  if (right >= 0 && !causal) allowed = allowed & (ahead <= right);
  return allowed;
}

struct Case {
  const char* name;
  int64_t s, s_k, b, n, g, d;
  bool causal = true;
  int64_t left = -1, right = -1;
  bool mask = false;
  double dropout = 0.0;
  double softcap = 0.0;
  bool sinks = false;
  bool bias = false;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Attention
    : public ::testing::TestWithParam<std::tuple<Case, at::ScalarType, bool, AttentionBackend>> {};

TEST_P(Attention, ForwardAndGradientsMatchTheFormula) {
  const auto& [c, type, recompute, backend] = GetParam();
  const double scale = 1.0 / std::sqrt(static_cast<double>(c.d));
  // Strided views of one projection, as the model gives them.
  const at::Tensor packed_q = draw({c.s, c.b, c.n, c.d + 3}, type),
                   packed = draw({c.s_k, c.b, c.g, 2 * c.d}, type, 2);
  at::Tensor q = packed_q.narrow(3, 0, c.d).requires_grad_();
  at::Tensor k = packed.narrow(3, 0, c.d).detach().requires_grad_();
  at::Tensor v = packed.narrow(3, c.d, c.d).detach().requires_grad_();
  AttentionOptions options;
  options.causal = c.causal;
  options.scale = scale;
  options.window_left = c.left;
  options.window_right = c.right;
  options.recompute = recompute;
  options.softcap = c.softcap;
  options.backend = backend;
  at::Tensor allowed = allowed_keys(c.s, c.s_k, c.causal, c.left, c.right), keep;
  if (c.mask) {
    at::manual_seed(9);
    options.mask = at::rand({c.b, 1, c.s, c.s_k}) < 0.4;
    options.mask.select(0, 0).select(1, 0).fill_(true);  // one row that may attend to nothing
    allowed = allowed & options.mask.logical_not();
  }
  if (c.dropout > 0) {
    options.dropout = c.dropout;
    options.key = random_key(1, "attention", 2);
    options.place = {at::arange(4, 4 + c.b), at::arange(c.s_k - c.s, c.s_k)};
    options.key_position = at::arange(c.s_k);
    options.first_head = 2;
    keep =
        attention_dropout_mask(c.n, 2, c.dropout, options.key, options.place, options.key_position);
  }
  if (c.sinks)
    options.sinks = draw({c.n}, type == at::kDouble ? at::kDouble : at::kFloat, 7).requires_grad_();
  if (c.bias)
    options.distance_bias =
        draw({c.n, c.s + c.s_k - 1}, type == at::kDouble ? at::kDouble : at::kFloat, 8)
            .requires_grad_();
  const at::Tensor out = core_attention(q, k, v, options);
  const at::Tensor dout = draw(out.sizes(), type, 5);
  out.backward(dout);

  at::Tensor wide_q = q.detach().to(at::kDouble).requires_grad_();
  at::Tensor wide_k = k.detach().to(at::kDouble).requires_grad_();
  at::Tensor wide_v = v.detach().to(at::kDouble).requires_grad_();
  at::Tensor wide_sinks;
  if (c.sinks) wide_sinks = options.sinks.detach().to(at::kDouble).requires_grad_();
  at::Tensor wide_bias;
  if (c.bias) wide_bias = options.distance_bias.detach().to(at::kDouble).requires_grad_();
  const at::Tensor expected =
      reference(wide_q, wide_k, wide_v, allowed, scale, keep, c.softcap, wide_sinks, wide_bias);
  expected.backward(dout.to(at::kDouble));
  const double tolerance = type == at::kDouble ? 1e-12 : type == at::kFloat ? 2e-6 : 2e-2;
  EXPECT_TRUE(out.is_contiguous());
  EXPECT_EQ(out.scalar_type(), type);
  EXPECT_LT(relative_error(out, expected), tolerance);
  EXPECT_LT(relative_error(q.grad(), wide_q.grad()), tolerance);
  EXPECT_LT(relative_error(k.grad(), wide_k.grad()), tolerance);
  EXPECT_LT(relative_error(v.grad(), wide_v.grad()), tolerance);
  if (c.sinks) {
    EXPECT_LT(relative_error(options.sinks.grad(), wide_sinks.grad()), tolerance);
  }
  if (c.bias) {
    EXPECT_LT(relative_error(options.distance_bias.grad(), wide_bias.grad()), tolerance);
  }
}

// Each group's queries, keys and values in one tensor, of which a library takes the groups for
// samples.
TEST(Attention, SinksAndBiasOfPackedHeadsAreThoseOfSeparateOnes) {
  const int64_t s = 13, b = 2, g = 3, r = 2, d = 8;
  for (const auto& [backend, bias] : {std::pair{AttentionBackend::kAuto, false},
                                      {AttentionBackend::kUnfused, false},
                                      {AttentionBackend::kAuto, true}}) {
    AttentionOptions options;
    options.scale = 0.3;
    options.backend = backend;
    const at::Tensor flat = draw({s, b, g * (r + 2) * d}, at::kDouble),
                     more = draw(bias ? std::vector<int64_t>{g * r, 2 * s - 1}
                                      : std::vector<int64_t>{g * r},
                                 at::kDouble, 2),
                     dout = draw({s, b, g * r * d}, at::kDouble, 3);
    const auto run = [&](bool packed) {
      const at::Tensor x = flat.clone().requires_grad_();
      at::Tensor& added = bias ? options.distance_bias : options.sinks;
      added = more.clone().requires_grad_();
      const at::Tensor view = x.view({s, b, g, r + 2, d});
      const at::Tensor out = packed
                                 ? packed_attention(x, {g, r, d}, {}, options)
                                 : core_attention(view.narrow(3, 0, r).reshape({s, b, g * r, d}),
                                                  view.select(3, r), view.select(3, r + 1), options)
                                       .reshape({s, b, g * r * d});
      out.backward(dout);
      return std::array{out.detach(), x.grad(), added.grad()};
    };
    const auto packed = run(true), apart = run(false);
    for (size_t i = 0; i < packed.size(); ++i)
      EXPECT_LT(relative_error(packed[i], apart[i]), 1e-12) << i;
  }
}

const Case kPlain[] = {
    {"causal", 33, 33, 2, 4, 4, 16},
    {"causal_long", 129, 129, 1, 2, 2, 64},
    {"grouped", 17, 17, 2, 6, 2, 8},
    {"multi_query", 17, 17, 2, 4, 1, 8},
    {"one_token", 1, 1, 1, 1, 1, 4},
    {"decode", 1, 40, 2, 4, 2, 16},
    {"chunk", 7, 40, 2, 4, 2, 16},
    {"bidirectional", 20, 20, 2, 2, 2, 16, false},
    {"cross", 9, 21, 2, 2, 2, 16, false},
    {"sinks", 33, 33, 2, 6, 2, 16, true, -1, -1, false, 0.0, 0.0, true},
    {"sinks_decode", 1, 40, 2, 4, 2, 16, true, -1, -1, false, 0.0, 0.0, true},
};
const Case kUnfusedOnly[] = {
    {"more_queries", 9, 4, 2, 2, 2, 8},
    {"window", 33, 33, 2, 4, 2, 8, true, 5},
    {"window_both", 33, 33, 2, 2, 2, 8, false, 3, 4},
    {"window_decode", 2, 33, 2, 2, 2, 8, true, 3},
    {"mask", 12, 14, 3, 4, 2, 8, false, -1, -1, true},
    {"mask_causal", 12, 12, 3, 4, 2, 8, true, -1, -1, true},
    {"dropout", 12, 12, 2, 4, 2, 8, true, -1, -1, false, 0.3},
    {"dropout_chunk", 5, 12, 2, 4, 2, 8, true, -1, -1, false, 0.3},
    {"softcap", 12, 12, 2, 4, 2, 8, true, -1, -1, false, 0.0, 0.5},
    {"softcap_window_dropout", 5, 12, 2, 4, 2, 8, true, 3, -1, false, 0.3, 0.5},
    {"sinks_window", 33, 33, 2, 4, 2, 8, true, 5, -1, false, 0.0, 0.0, true},
    {"sinks_mask", 12, 14, 3, 4, 2, 8, false, -1, -1, true, 0.0, 0.0, true},
    {"bias", 12, 12, 3, 4, 4, 8, false, -1, -1, false, 0.0, 0.0, false, true},
    {"bias_causal_grouped_dropout", 12, 12, 2, 4, 2, 8, true, -1, -1, false, 0.3, 0.0, false, true},
    {"bias_mask_more_keys", 5, 14, 3, 2, 2, 8, false, -1, -1, true, 0.0, 0.0, false, true},
    {"bias_one_query", 1, 9, 2, 2, 2, 8, false, -1, -1, false, 0.0, 0.0, false, true},
    {"sinks_softcap_dropout", 12, 12, 2, 4, 2, 8, true, -1, -1, false, 0.3, 0.5, true},
};

std::string case_name(const ::testing::TestParamInfo<Attention::ParamType>& info) {
  const auto& [c, type, recompute, backend] = info.param;
  return std::string(c.name) + "_" + c10::toString(type) + (recompute ? "_recompute" : "") +
         (backend == AttentionBackend::kUnfused ? "_unfused" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Library, Attention,
    ::testing::Combine(::testing::ValuesIn(kPlain),
                       ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16), ::testing::Bool(),
                       ::testing::Values(AttentionBackend::kAuto)),
    case_name);
INSTANTIATE_TEST_SUITE_P(PlainUnfused, Attention,
                         ::testing::Combine(::testing::ValuesIn(kPlain),
                                            ::testing::Values(at::kDouble),
                                            ::testing::Values(false),
                                            ::testing::Values(AttentionBackend::kUnfused)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Unfused, Attention,
                         ::testing::Combine(::testing::ValuesIn(kUnfusedOnly),
                                            ::testing::Values(at::kDouble, at::kFloat, at::kHalf),
                                            ::testing::Bool(),
                                            ::testing::Values(AttentionBackend::kAuto)),
                         case_name);

TEST(AttentionErrors, ABackendThatCannotIsRefused) {
  const at::Tensor q = draw({4, 1, 2, 8}, at::kFloat);
  AttentionOptions options;
  options.window_left = 1;
  options.backend = AttentionBackend::kFlash;
  try {
    core_attention(q, q, q, options);
    FAIL() << "flash attention accepted a window";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("flash cannot compute this attention: a sliding window is given"),
              std::string::npos)
        << error.what();
  }
  options.window_left = -1;
  options.backend = AttentionBackend::kFused;
  EXPECT_THROW(core_attention(q, q, q, options), Error);
  EXPECT_THROW(
      core_attention(q, draw({4, 1, 3, 8}, at::kFloat), draw({4, 1, 3, 8}, at::kFloat), options),
      InternalError);
}

TEST(AttentionParts, TakesSamplesThenHeadsAtATime) {
  const int64_t gib = int64_t{1} << 30;
  const AttentionParts many = attention_parts(16, 4, 1, 4096, 4096, true);
  EXPECT_EQ(many.samples, 8);
  EXPECT_EQ(many.heads, 4);
  EXPECT_EQ(many.scratch_bytes, gib);
  const AttentionParts one = attention_parts(8, 4, 1, 16384, 16384, true);
  EXPECT_EQ(one.samples, 1);
  EXPECT_EQ(one.heads, 4);
  const AttentionParts divided = attention_parts(8, 4, 1, 32768, 32768, true);
  EXPECT_EQ(divided.samples, 1);
  EXPECT_EQ(divided.heads, 2);
  EXPECT_EQ(divided.scratch_bytes, 4 * gib);
  EXPECT_EQ(attention_parts(1, 8, 2, 32768, 32768, true).heads, 8) << "of several groups";
  const AttentionParts any_order = attention_parts(8, 4, 1, 32768, 32768, false);
  EXPECT_EQ(any_order.samples, 8);
  EXPECT_EQ(any_order.heads, 4);
  EXPECT_EQ(any_order.scratch_bytes, 0);
}

}  // namespace
}  // namespace megatron
