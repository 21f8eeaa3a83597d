// The gated delta rule: published vectors, chunks of any length against single steps, gradients,
// borders of documents, extreme numbers.
#include "megatron/transformer/ssm/gated_delta.h"

#include <string>
#include <vector>

#include "megatron/transformer/ssm/causal_conv.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

constexpr int64_t kDeltaChunks[] = {1, 2, 3, 16, 64, 128};

at::Tensor delta_rows(const at::Tensor& x) { return x.unsqueeze(1); }

struct DeltaVector {
  at::Tensor grad = delta_rows(u(8, {4, 1, 2}));
  DeltaOperands operands{unit_length(delta_rows(u(1, {4, 1, 2}))),
                         unit_length(delta_rows(u(2, {4, 1, 2}))),
                         delta_rows(u(3, {4, 1, 2})),
                         -at::exp(u(4, {1})) * time_steps(delta_rows(u(5, {4, 1})), u(18, {1}), {}),
                         at::sigmoid(delta_rows(u(6, {4, 1}))),
                         {}};
};

TEST(GatedDelta, Vectors) {
  const DeltaVector v;
  expect_vector(v.operands.g, {-0.157045056039, -0.248500951369, -0.289007002455, -0.23761051453},
                "g");
  expect_vector(v.operands.beta, {0.730772086573, 0.689650766871, 0.555492928201, 0.387570540885},
                "beta");
  const std::vector<double> o = {-0.175786287194,  -0.253977678044, -0.21782774443,
                                 -0.363680149503,  -0.106437805693, 0.166386215322,
                                 0.00106557183217, 0.240719502154},
                            state = {-0.0715818364164, -0.390732004498, 0.594941240078,
                                     0.40716221123};
  for (const int64_t chunk : kDeltaChunks) {
    const DeltaResult result = delta_rule(v.operands, {}, chunk);
    expect_vector(result.o, o, "o");
    expect_vector(result.state, state, "S_4");
    const ScanState from{.state = u(7, {1, 1, 2, 2})};
    const DeltaGrads grads = delta_rule_backward(v.grad, {}, v.operands, from, chunk);
    expect_vector(grads.q,
                  {1.00009422445, 0.741154067345, -0.0644409304238, -0.19156717807, -0.494383764323,
                   0.0899297500428, -0.0879692717745, 0.376795362935},
                  "dq");
    expect_vector(grads.k,
                  {1.15829124601, -0.0983630461986, 1.07144335363, 0.325992304568, -0.444436910872,
                   -0.453793043653, -0.355793849409, -0.0128730466527},
                  "dk");
    expect_vector(grads.v,
                  {-0.541508099719, -0.275033487329, 0.208305190171, 0.250337142721, 0.42029455106,
                   0.407933879116, -0.138879208022, -0.0615775147344},
                  "dv");
    expect_vector(grads.g, {0.798174909368, 0.207869919652, -0.0784450125836, 0.214011222506},
                  "dg");
    expect_vector(grads.beta, {1.21932957336, -0.833653689368, 0.966230173643, -0.44885652009},
                  "gradient of beta");
    const std::vector<double> dstate = {-0.268412373834, -0.25645323064, -0.29444080624,
                                        -0.542109728417};
    expect_vector(delta_rule_backward(v.grad, {}, v.operands, {}, chunk).state, dstate, "dS_0");
    expect_vector(delta_state_grad(v.grad, v.operands, {}, chunk), dstate, "dS_0 alone");
    const DeltaSummary map = delta_summary(v.operands, {}, chunk);
    expect_vector(map.decay, {0.0317614699269, -0.0767354375848, -0.010238932045, 0.135742478426},
                  "M");
    expect_vector(map.state, state, "F");
    expect_vector(delta_rule(v.operands, from, chunk).state,
                  {0.00605703570598, -0.32723428882, 0.472261930911, 0.277998554356},
                  "S_4 from S_0");
  }
  const DeltaWrites writes = delta_writes(v.operands, {});
  expect_vector(writes.W,
                {0.597228420897, -0.182754531736, -0.167010164174, -0.400366680638,
                 -0.0490543276657, 0.0134699817735, 0.00363500371263, 0.0533704500951},
                "W");
  expect_vector(writes.U,
                {-0.502600311221, -0.726161648134, -0.666910653275, -0.326975035469, 0.297792234882,
                 0.400519398863, 0.301786979364, 0.257430661901},
                "U");
  const DeltaResult steps = delta_steps(v.operands, {});
  expect_vector(steps.o, o, "o by steps");
  expect_vector(steps.state, state, "S_4 by steps");
}

TEST(GatedDelta, VectorOfDocuments) {
  DeltaVector v;
  v.operands.runs = document_runs(ids({0, 0, 1, 1}));
  for (const int64_t chunk : kDeltaChunks)
    expect_vector(delta_rule(v.operands, {}, chunk).o.narrow(0, 2, 2),
                  {0.126438396557, 0.280674899068, -0.0440350108907, 0.145630745174}, "o");
}

// Two sequences, 2 heads of keys and 4 of values, an initial state and a gradient of the last one.
struct DeltaCase {
  explicit DeltaCase(bool documents, int64_t s = 37) {
    operands = {unit_length(u(1, {s, 2, 2, 3})),
                unit_length(u(2, {s, 2, 2, 3})),
                u(3, {s, 2, 4, 5}),
                -at::exp(u(4, {4})) * time_steps(u(5, {s, 2, 4}), u(18, {4}), {}),
                at::sigmoid(u(6, {s, 2, 4})),
                {}};
    grad = u(8, {s, 2, 4, 5});
    initial.state = u(7, {2, 4, 3, 5});
    dstate = u(9, {2, 4, 3, 5});
    if (documents) operands.runs = runs_of_two_sequences(s);
  }
  DeltaOperands operands;
  ScanState initial;
  at::Tensor grad, dstate;
};

TEST(GatedDelta, ChunksOfAnyLengthAgreeWithSteps) {
  for (const bool documents : {false, true}) {
    const DeltaCase c(documents);
    const DeltaResult steps = delta_steps(c.operands, c.initial);
    const DeltaGrads by_one = delta_rule_backward(c.grad, c.dstate, c.operands, c.initial, 1);
    for (const int64_t chunk : kDeltaChunks) {
      const DeltaResult result = delta_rule(c.operands, c.initial, chunk);
      EXPECT_LT(largest(result.o - steps.o), 1e-12) << chunk;
      EXPECT_LT(largest(result.state - steps.state), 1e-12) << chunk;
      const DeltaGrads grads = delta_rule_backward(c.grad, c.dstate, c.operands, c.initial, chunk);
      EXPECT_LT(largest(grads.q - by_one.q), 1e-12) << chunk;
      EXPECT_LT(largest(grads.k - by_one.k), 1e-12) << chunk;
      EXPECT_LT(largest(grads.v - by_one.v), 1e-12) << chunk;
      EXPECT_LT(largest(grads.g - by_one.g), 1e-12) << chunk;
      EXPECT_LT(largest(grads.beta - by_one.beta), 1e-12) << chunk;
      EXPECT_LT(largest(grads.state - by_one.state), 1e-12) << chunk;
      const at::Tensor run = documents ? c.operands.runs[0] : at::Tensor();
      const DeltaSummary map = delta_summary(c.operands, run, chunk);
      EXPECT_LT(largest(at::matmul(map.decay, c.initial.state) + map.state - steps.state), 1e-12);
      const DeltaGrads alone = delta_rule_backward(c.grad, {}, c.operands, c.initial, chunk);
      EXPECT_LT(largest(delta_state_grad(c.grad, c.operands, run, chunk) - alone.state), 1e-12);
      EXPECT_LT(largest(at::matmul(map.decay.mT(), c.dstate) + alone.state - grads.state), 1e-12);
    }
  }
}

TEST(GatedDelta, GradientsAreFiniteDifferences) {
  for (const bool documents : {false, true}) {
    const DeltaCase c(documents, 33);
    const auto f = [&] {
      const DeltaResult result = delta_rule(c.operands, c.initial, 7);
      return at::cat({result.o.reshape({-1}), result.state.reshape({-1})});
    };
    const at::Tensor d = at::cat({c.grad.reshape({-1}), c.dstate.reshape({-1})});
    const DeltaGrads grads = delta_rule_backward(c.grad, c.dstate, c.operands, c.initial, 7);
    const DeltaOperands& o = c.operands;
    for (const auto& [tensor, grad] : {std::pair{o.q, grads.q},
                                       {o.k, grads.k},
                                       {o.v, grads.v},
                                       {o.g, grads.g},
                                       {o.beta, grads.beta},
                                       {c.initial.state, grads.state}})
      EXPECT_LT(slope_error(tensor, grad, d, f), 2e-7);
  }
  const at::Tensor x = u(3, {4, 5}), dy = u(9, {4, 5});
  EXPECT_LT(slope_error(x, unit_length_backward(dy, x), dy, [&] { return unit_length(x); }), 1e-8);
}

// A packed sample is its documents, one after another.
TEST(GatedDelta, DocumentsAreAlone) {
  const int64_t s = 41;
  for (const int64_t border : {1, 2, 15, 16, 17, 32, 40}) {
    DeltaCase c(/*documents=*/false, s);
    at::Tensor of_tokens = at::zeros({2, s}, at::kLong);
    of_tokens.narrow(1, border, s - border) += 3;
    c.operands.runs = document_runs(of_tokens);
    const DeltaResult packed = delta_rule(c.operands, {}, 16);
    const DeltaGrads grads = delta_rule_backward(c.grad, {}, c.operands, {}, 16);
    for (const auto& [first, rows] : {std::pair{int64_t{0}, border}, {border, s - border}}) {
      const auto part = [first = first, rows = rows](const at::Tensor& x) {
        return x.narrow(0, first, rows);
      };
      const DeltaOperands& o = c.operands;
      const DeltaOperands own{part(o.q), part(o.k), part(o.v), part(o.g), part(o.beta), {}};
      EXPECT_LT(largest(part(packed.o) - delta_rule(own, {}, 16).o), 1e-13) << border;
      const DeltaGrads alone = delta_rule_backward(part(c.grad), {}, own, {}, 16);
      EXPECT_LT(largest(part(grads.q) - alone.q), 1e-12) << border;
      EXPECT_LT(largest(part(grads.k) - alone.k), 1e-12) << border;
      EXPECT_LT(largest(part(grads.v) - alone.v), 1e-12) << border;
      EXPECT_LT(largest(part(grads.g) - alone.g), 1e-12) << border;
      EXPECT_LT(largest(part(grads.beta) - alone.beta), 1e-12) << border;
    }
  }
}

// fp32 with decays that vanish, and that do not decay at all.
TEST(GatedDelta, ExtremeDecaysStayFinite) {
  for (const double g : {0.0, -1e-6, -30.0, -1e4}) {
    DeltaCase c(true, 300);
    c.operands.g.fill_(g);
    DeltaOperands narrow = c.operands;
    for (at::Tensor* t : {&narrow.q, &narrow.k, &narrow.v, &narrow.g, &narrow.beta})
      *t = t->to(at::kFloat);
    const DeltaResult expected = delta_rule(c.operands, {}, 64), found = delta_rule(narrow, {}, 64);
    EXPECT_LT(largest(found.o - expected.o), 2e-5 * (1 + largest(expected.o))) << g;
    const DeltaGrads exact = delta_rule_backward(c.grad, {}, c.operands, {}, 64),
                     grads = delta_rule_backward(c.grad.to(at::kFloat), {}, narrow, {}, 64);
    for (const auto& [x, y] : {std::pair{exact.q, grads.q},
                               {exact.k, grads.k},
                               {exact.v, grads.v},
                               {exact.g, grads.g},
                               {exact.beta, grads.beta}})
      EXPECT_LT(largest(x - y), 2e-4 * (1 + largest(x))) << g;
  }
}

// 32768 tokens of fast and slow heads, time steps from 0 to 100, shares from 0 to 1: finite in
// fp32, and as in fp64.
TEST(GatedDelta, ExtremeNumbersStayFiniteOverLongTexts) {
  constexpr int64_t s = 32768;
  const at::Tensor A = at::tensor({-1.0, -16.0, -1e3, -1e4}, at::kDouble);
  at::Tensor a = 3 * u(5, {s, 1, 4}), b = 3 * u(6, {s, 1, 4});
  for (int64_t i = 0; i < s; i += 7) a[i] = i % 2 == 0 ? 100.0 : -100.0;
  for (int64_t i = 0; i < s; i += 11) b[i] = i % 2 == 0 ? 100.0 : -100.0;
  const at::Tensor bias = at::zeros({4}, at::kDouble);
  const auto single = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const DeltaOperands exact{unit_length(u(1, {s, 1, 1, 4})),
                            unit_length(u(2, {s, 1, 1, 4})),
                            u(3, {s, 1, 4, 3}),
                            A * time_steps(a, bias, {}),
                            at::sigmoid(b),
                            {}},
      fp32{single(exact.q),        single(exact.k),
           single(exact.v),        single(A) * time_steps(single(a), single(bias), {}),
           at::sigmoid(single(b)), {}};
  const at::Tensor grad = u(8, {s, 1, 4, 3});
  const auto error = [](const at::Tensor& x, const at::Tensor& y) {
    return largest(x.to(at::kDouble) - y) / largest(y);
  };
  const DeltaResult expected = delta_rule(exact, {}, 64), found = delta_rule(fp32, {}, 64);
  EXPECT_LT(error(found.o, expected.o), 1e-5);
  EXPECT_LT(error(found.state, expected.state), 1e-5);
  const DeltaGrads precise = delta_rule_backward(grad, {}, exact, {}, 64),
                   grads = delta_rule_backward(single(grad), {}, fp32, {}, 64);
  EXPECT_LT(error(grads.q, precise.q), 1e-5);
  EXPECT_LT(error(grads.k, precise.k), 1e-5);
  EXPECT_LT(error(grads.v, precise.v), 1e-5);
  EXPECT_LT(error(grads.g, precise.g), 1e-5);
  EXPECT_LT(error(grads.beta, precise.beta), 1e-5);
}

}  // namespace
}  // namespace megatron
