// The scan of Mamba-2: published vectors, chunks of any length against single steps, gradients,
// borders of documents, extreme numbers.
#include "megatron/transformer/ssm/ssd_scan.h"

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "megatron/transformer/ssm/causal_conv.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

constexpr int64_t kChunks[] = {1, 2, 3, 16, 64, 128};

at::Tensor rows_of_one(const at::Tensor& x) { return x.unsqueeze(1); }

struct ScanVector {
  explicit ScanVector(const TimeStepLimits& limits = {})
      : operands{
            rows_of_one(u(1, {5, 2, 2})),       time_steps(r, dt_bias, limits), -at::exp(A_log),
            rows_of_one(u(4, {5, 1, 2})),       rows_of_one(u(5, {5, 1, 2})),   u(6, {2}),
            document_runs(ids({0, 0, 1, 1, 1}))} {}
  at::Tensor r = rows_of_one(u(2, {5, 2}) - 0.5), dt_bias = u(18, {2}), A_log = u(3, {2}),
             dy = rows_of_one(u(8, {5, 2, 2}));
  ScanOperands operands;
};

TEST(SsdScan, TimeSteps) {
  const at::Tensor v = at::tensor({-50.0, -20.0, -1.0, 0.0, 20.0, 20.5}, at::kDouble);
  const at::Tensor dt = time_steps(v.view({6, 1, 1}), at::zeros({1}, at::kDouble), {}).view({-1});
  const double expected[] = {1.92874984796392e-22, 2.06115362031438e-09, 0.313261687518223,
                             0.693147180559945,    20.0000000020612,     20.5};
  for (int64_t i = 0; i < 6; ++i)
    EXPECT_NEAR(dt[i].item<double>() / expected[i], 1.0, 1e-13) << v[i].item<double>();
  // fp32: log(1 + exp(v)) would be 0 at -17, and so would the gradient
  const at::Tensor r = at::full({1, 1, 1}, -17.0f);
  EXPECT_NEAR(time_steps(r, at::zeros({1}), {}).item<double>() / 4.1399377e-8, 1.0, 1e-6);
  EXPECT_NEAR(
      time_steps_backward(at::ones({1, 1, 1}), r, at::zeros({1}), {}).r.item<double>() / 4.14e-8,
      1.0, 1e-4);
}

TEST(SsdScan, Vectors) {
  const ScanVector v;
  expect_vector(v.operands.dt,
                {0.321030280203, 0.198432002211, 0.10080724404, 0.0903429936921, 0.0992876025295,
                 0.194081121779, 0.315202570904, 0.504756706038, 0.456889942576, 0.353569773718},
                "time steps");
  const std::vector<double> y = {
      0.811577477906,  0.765875194149,   0.299975312522,   -0.179362729712, -1.23451426903,
      -1.40976334432,  -0.717911992732,  -0.0166267844257, 0.563954847775,  0.943681650027,
      0.678780761861,  0.31007186095,    -0.39482458242,   -1.09799843788,  -1.29671687382,
      -0.849874277423, -0.0741901006956, 0.669027874598,   0.889575466274,  0.8208041508};
  const std::vector<double> state = {0.0665802945279,  0.0949110871207, -0.205998619189,
                                     -0.0639711523889, -0.221958397182, 0.0589045087212,
                                     -0.260357290212,  -0.0464086742583};
  for (const int64_t chunk : kChunks) {
    const ScanResult result = ssd_scan(v.operands, {}, chunk);
    expect_vector(result.y, y, "y");
    expect_vector(result.state, state, "S_5");
    const ScanGrads grads = ssd_scan_backward(v.dy, {}, v.operands, {}, chunk);
    expect_vector(grads.x, {-0.906319808785,  -1.18090577592,  -0.685471229447, -0.134647998207,
                            0.64706276471,    1.06228339142,   0.790125079134,  0.350332777637,
                            -0.28164435754,   -0.890052796111, -0.956485816701, -0.694085693491,
                            -0.0729511736356, 0.721683141033,  1.10895057711,   1.02345422569,
                            0.422221871085,   -0.33663040097,  -0.747024792974, -0.874378870494},
                  "dx");
    expect_vector(
        grads.dt,
        {-0.771150324329, -0.178452737399, -1.10129414365, -0.598507191503, -0.493677696004,
         -1.08034567327, -0.250875333936, -0.984966743419, -0.0467543044799, -0.386177580621},
        "gradient of the time steps");
    expect_vector(grads.A, {-0.0764598311936, -0.159095377145}, "dA");
    expect_vector(
        grads.B,
        {0.36775260698, -0.112120969436, -0.206242827145, -0.151624652388, -0.200933405264,
         -0.0903445451133, 0.591780997111, 1.04250383112, 0.313837045859, -0.161585164663},
        "dB");
    expect_vector(
        grads.C,
        {0.531704080872, 0.225016357259, -0.50405972686, -0.361678981625, -0.321828237,
         -0.215657189123, 0.221563253889, 0.760747628054, 0.533705910509, 0.0517507876584},
        "dC");
    expect_vector(grads.D, {-4.82465822484, -5.41463932254}, "dD");
    const TimeStepGrads steps = time_steps_backward(grads.dt, v.r, v.dt_bias, {});
    expect_vector(
        steps.r,
        {-0.211756887855, -0.0321187217021, -0.105606081969, -0.0517003880319, -0.0466613042688,
         -0.19058260223, -0.0678263905468, -0.39038918262, -0.0171471397609, -0.115012566606},
        "dr");
    expect_vector(steps.bias, {-0.448997804401, -0.77980346119}, "gradient of dt_bias");
    expect_vector(grads.A * v.operands.A, {0.038436186065, 0.0588983381214}, "gradient of A_log");
  }
  const ScanResult steps = ssd_steps(v.operands, {});
  expect_vector(steps.y, y, "y by steps");
  expect_vector(steps.state, state, "S_5 by steps");
}

TEST(SsdScan, VectorsWithoutBordersAndFromAState) {
  ScanVector v;
  const at::Tensor initial = u(7, {1, 2, 2, 2});
  for (const int64_t chunk : kChunks)
    expect_vector(ssd_scan(v.operands, {.state = initial}, chunk).y.narrow(0, 0, 2),
                  {0.622476924656, -0.056484626233, 0.201215336365, 0.685000814786, -1.19437625591,
                   -2.70231016735, -1.25059874822, 1.23815562128},
                  "from S_0");
  v.operands.runs.reset();
  for (const int64_t chunk : kChunks)
    expect_vector(ssd_scan(v.operands, {}, chunk).y[4],
                  {-0.0182613507092, 0.720979571509, 0.904382328676, 0.810195703702},
                  "without borders");
}

TEST(SsdScan, VectorOfLimits) {
  const TimeStepLimits limits{0.5, 0.9};
  const ScanVector v(limits);
  for (const int64_t chunk : kChunks) {
    expect_vector(ssd_scan(v.operands, {}, chunk).y[4],
                  {-0.108636564317, 0.626657864175, 0.866406401847, 0.825085186207}, "limited");
    const ScanGrads grads = ssd_scan_backward(v.dy, {}, v.operands, {}, chunk);
    const at::Tensor dr = time_steps_backward(grads.dt, v.r, v.dt_bias, limits).r.view({-1});
    for (int64_t i = 0; i < dr.numel(); ++i)
      EXPECT_NEAR(dr[i].item<double>(), i == 7 ? -0.324019395424 : 0.0, 1e-11) << i;
  }
  expect_vector(ssd_steps(v.operands, {}).y[4],
                {-0.108636564317, 0.626657864175, 0.866406401847, 0.825085186207},
                "limited, by steps");
}

TEST(SsdScan, VectorsOfSegments) {
  for (const bool two_documents : {false, true}) {
    const std::vector<int64_t> of_tokens =
        two_documents ? std::vector<int64_t>{0, 0, 0, 1, 1, 1, 1, 1} : std::vector<int64_t>(8, 0);
    const ScanOperands all{
        rows_of_one(u(1, {8, 1, 1})),
        time_steps(rows_of_one(u(2, {8, 1}) - 0.5), at::zeros({1}, at::kDouble), {}),
        -at::exp(u(3, {1})),
        rows_of_one(u(4, {8, 1, 2})),
        rows_of_one(u(5, {8, 1, 2})),
        u(6, {1}),
        document_runs(ids(of_tokens))};
    const at::Tensor dy = rows_of_one(u(8, {8, 1, 1}));
    expect_vector(
        ssd_scan(all, {}, 3).y,
        two_documents
            ? std::vector<double>{0.633389003141, 0.629573729262, 0.304596616371, -0.283527591398,
                                  -0.858164782135, -0.714819038749, -0.899600226005, 0.290502199137}
            : std::vector<double>{0.633389003141, 0.629573729262, 0.304596616371, -0.24190143283,
                                  -0.748155569148, -0.71430734713, -0.962779739434, 0.276859791613},
        "y");
    expect_vector(
        ssd_scan_backward(dy, {}, all, {}, 3).x,
        two_documents
            ? std::vector<double>{0.0773080994283, -1.2733795118, -0.651261113458, -0.16465899853,
                                  0.248080931486, 0.919941885839, 1.09842442131, 0.258568133297}
            : std::vector<double>{-0.318831371548, -0.977776151104, -0.384900257348, -0.16465899853,
                                  0.248080931486, 0.919941885839, 1.09842442131, 0.258568133297},
        "dx");
    at::Tensor state = at::zeros({1, 1, 1, 2}, at::kDouble), incoming, decays, states;
    for (int64_t segment = 0; segment < 4; ++segment) {
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, 2 * segment, 2); };
      const ScanOperands own{part(all.x), part(all.dt), all.A,         part(all.B),
                             part(all.C), all.D,        part(all.runs)};
      const at::Tensor run = all.runs[std::max<int64_t>(2 * segment - 1, 0)];
      const at::Tensor decay = ssd_decay(own, run), added = ssd_state(own, run, 128);
      const auto append = [](at::Tensor& to, const at::Tensor& t) {
        to = to.defined() ? at::cat({to, t.reshape({-1})}) : t.reshape({-1});
      };
      append(decays, decay);
      append(states, added);
      append(incoming, state);
      state = decay.view({1, 1, 1, 1}) * state + added;
    }
    expect_vector(
        decays, {0.56996310512, two_documents ? 0.0 : 0.796807872035, 0.7190733267, 0.441551663099},
        "decays");
    expect_vector(states.narrow(0, 2, 2),
                  two_documents ? std::vector<double>{-0.00127526420214, 0.0321742294129}
                                : std::vector<double>{0.0944128740719, 0.0962948768892},
                  "state of the second segment");
    expect_vector(states.narrow(0, 4, 4),
                  {0.307345462252, 0.0105228730393, -0.311933529986, -0.300802026829},
                  "states of the last segments");
    expect_vector(incoming,
                  two_documents
                      ? std::vector<double>{0, 0, -0.36549146853, 0.118063337933, -0.00127526420214,
                                            0.0321742294129, 0.30642845378, 0.0336585032172}
                      : std::vector<double>{0, 0, -0.36549146853, 0.118063337933, -0.196813605214,
                                            0.190368673953, 0.165822048411, 0.147411908718},
                  "incoming states");
  }
}

// Two sequences of 37 rows, 4 heads in 2 groups, an initial state and a gradient of the last one.
struct ScanCase {
  explicit ScanCase(bool documents = true, int64_t s = 37) {
    operands = {u(1, {s, 2, 4, 3}),
                time_steps(u(2, {s, 2, 4}), u(18, {4}), {}),
                -at::exp(u(3, {4})),
                u(4, {s, 2, 2, 5}),
                u(5, {s, 2, 2, 5}),
                u(6, {4}),
                {}};
    dy = u(8, {s, 2, 4, 3});
    initial.state = u(7, {2, 4, 3, 5});
    dstate = u(9, {2, 4, 3, 5});
    if (documents) operands.runs = runs_of_two_sequences(s);
  }
  ScanOperands operands;
  ScanState initial;
  at::Tensor dy, dstate;
};

TEST(SsdScan, ChunksOfAnyLengthAgreeWithSteps) {
  for (const bool documents : {false, true}) {
    const ScanCase c(documents);
    const ScanResult steps = ssd_steps(c.operands, c.initial);
    const ScanGrads by_one = ssd_scan_backward(c.dy, c.dstate, c.operands, c.initial, 1);
    for (const int64_t chunk : kChunks) {
      const ScanResult result = ssd_scan(c.operands, c.initial, chunk);
      EXPECT_LT(largest(result.y - steps.y), 1e-12) << chunk;
      EXPECT_LT(largest(result.state - steps.state), 1e-12) << chunk;
      const ScanGrads grads = ssd_scan_backward(c.dy, c.dstate, c.operands, c.initial, chunk);
      EXPECT_LT(largest(grads.x - by_one.x), 1e-12) << chunk;
      EXPECT_LT(largest(grads.dt - by_one.dt), 1e-12) << chunk;
      EXPECT_LT(largest(grads.A - by_one.A), 1e-11) << chunk;
      EXPECT_LT(largest(grads.B - by_one.B), 1e-12) << chunk;
      EXPECT_LT(largest(grads.C - by_one.C), 1e-12) << chunk;
      EXPECT_LT(largest(grads.D - by_one.D), 1e-12) << chunk;
      EXPECT_LT(largest(grads.state - by_one.state), 1e-12) << chunk;
      const at::Tensor decay = ssd_decay(c.operands, {}).view({2, 4, 1, 1});
      EXPECT_LT(largest(decay * c.initial.state + ssd_state(c.operands, {}, chunk) - steps.state),
                1e-12);
    }
  }
}

TEST(SsdScan, GradientsAreFiniteDifferences) {
  for (const bool documents : {false, true}) {
    ScanCase c(documents, 33);
    const auto f = [&] {
      const ScanResult result = ssd_scan(c.operands, c.initial, 7);
      return at::cat({result.y.reshape({-1}), result.state.reshape({-1})});
    };
    const at::Tensor d = at::cat({c.dy.reshape({-1}), c.dstate.reshape({-1})});
    const ScanGrads grads = ssd_scan_backward(c.dy, c.dstate, c.operands, c.initial, 7);
    const ScanOperands& o = c.operands;
    for (const auto& [tensor, grad] : {std::pair{o.x, grads.x},
                                       {o.dt, grads.dt},
                                       {o.A, grads.A},
                                       {o.B, grads.B},
                                       {o.C, grads.C},
                                       {o.D, grads.D},
                                       {c.initial.state, grads.state}})
      EXPECT_LT(slope_error(tensor, grad, d, f), 1e-6);
  }
}

// A border at every offset of a chunk, and documents of one token.
TEST(SsdScan, PackedDocumentsAreDocumentsAlone) {
  constexpr int64_t s = 11, chunk = 4;
  ScanCase c(false, s);
  for (int64_t border = 1; border + 1 < s; ++border) {
    at::Tensor of_tokens = at::zeros({2, s}, at::kLong);
    of_tokens.narrow(1, border, s - border) += 1;
    of_tokens.narrow(1, border + 1, s - border - 1) += 1;
    c.operands.runs = document_runs(of_tokens);
    const ScanResult packed = ssd_scan(c.operands, {}, chunk);
    const ScanGrads grads = ssd_scan_backward(c.dy, c.dstate, c.operands, {}, chunk);
    at::Tensor dA = at::zeros({4}, at::kDouble), dD = at::zeros({4}, at::kDouble);
    int64_t begin = 0;
    for (const int64_t end : {border, border + 1, s}) {
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, begin, end - begin); };
      const ScanOperands alone{part(c.operands.x),
                               part(c.operands.dt),
                               c.operands.A,
                               part(c.operands.B),
                               part(c.operands.C),
                               c.operands.D,
                               {}};
      const ScanResult result = ssd_scan(alone, {}, chunk);
      EXPECT_LT(largest(part(packed.y) - result.y), 1e-12) << border;
      if (end == s) {
        EXPECT_LT(largest(packed.state - result.state), 1e-12) << border;
      }
      const ScanGrads own =
          ssd_scan_backward(part(c.dy), end == s ? c.dstate : at::Tensor(), alone, {}, chunk);
      for (const auto& [whole, document] :
           {std::pair{grads.x, own.x}, {grads.dt, own.dt}, {grads.B, own.B}, {grads.C, own.C}})
        EXPECT_LT(largest(part(whole) - document), 1e-12) << border;
      dA += own.A;
      dD += own.D;
      begin = end;
    }
    EXPECT_LT(largest(grads.A - dA), 1e-11) << border;
    EXPECT_LT(largest(grads.D - dD), 1e-11) << border;
  }
}

// The gradient of the state before a part, from its own outputs alone.
TEST(SsdScan, StateGradientOfAPart) {
  const ScanCase c;
  for (const int64_t chunk : {4, 128}) {
    const at::Tensor expected = ssd_scan_backward(c.dy, {}, c.operands, c.initial, chunk).state;
    EXPECT_LT(largest(ssd_state_grad(c.dy, c.operands, c.operands.runs[0], chunk) - expected),
              1e-13);
    // A document starts at the first row of sequence 1
    at::Tensor other = c.operands.runs[0].clone();
    other[1] -= 1;
    const at::Tensor cut = ssd_state_grad(c.dy, c.operands, other, chunk);
    EXPECT_EQ(largest(cut[1]), 0.0);
    EXPECT_LT(largest(cut[0] - expected[0]), 1e-13);
    EXPECT_EQ(largest(ssd_decay(c.operands, other)[1]), 0.0);
  }
}

// Fast and slow heads, time steps from 0 to 100: finite in fp32, and as in fp64.
TEST(SsdScan, ExtremeNumbersStayFinite) {
  constexpr int64_t s = 32768;
  const at::Tensor A = at::tensor({-1.0, -16.0, -1e3, -1e4}, at::kDouble);
  at::Tensor r = 3 * u(2, {s, 1, 4});
  for (int64_t i = 0; i < s; i += 7) r[i] = i % 2 == 0 ? 100.0 : -100.0;
  r[3].zero_();
  const at::Tensor bias = at::zeros({4}, at::kDouble);
  const ScanOperands exact{u(1, {s, 1, 4, 3}),
                           time_steps(r, bias, {}),
                           A,
                           u(4, {s, 1, 1, 5}),
                           u(5, {s, 1, 1, 5}),
                           u(6, {4}),
                           {}};
  const auto single = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const ScanOperands fp32{single(exact.x),
                          time_steps(single(r), single(bias), {}),
                          single(A),
                          single(exact.B),
                          single(exact.C),
                          single(exact.D),
                          {}};
  const at::Tensor dy = u(8, {s, 1, 4, 3});
  const ScanResult expected = ssd_scan(exact, {}, 128), result = ssd_scan(fp32, {}, 128);
  const auto error = [](const at::Tensor& a, const at::Tensor& b) {
    return largest(a.to(at::kDouble) - b) / largest(b);
  };
  EXPECT_LT(error(result.y, expected.y), 1e-5);
  EXPECT_LT(error(result.state, expected.state), 1e-5);
  const ScanGrads precise = ssd_scan_backward(dy, {}, exact, {}, 128),
                  grads = ssd_scan_backward(single(dy), {}, fp32, {}, 128);
  EXPECT_LT(error(grads.x, precise.x), 1e-5);
  EXPECT_LT(error(grads.dt, precise.dt), 1e-5);
  EXPECT_LT(error(grads.A, precise.A), 1e-4);
  EXPECT_LT(error(grads.B, precise.B), 1e-5);
  EXPECT_LT(error(grads.C, precise.C), 1e-5);
  EXPECT_TRUE(at::isfinite(time_steps_backward(grads.dt, single(r), single(bias), {}).r)
                  .all()
                  .item<bool>());
}

// 16384 single steps with an fp32 state lose no more than the scan in chunks does.
TEST(SsdScan, LongDecodingIsAsExactAsTheScan) {
  constexpr int64_t s = 16384;
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
  const auto single = [](const at::Tensor& t) { return t.to(at::kFloat); };
  const at::Tensor bias = at::tensor({-3.0, -5.0}, at::kDouble);
  const ScanOperands narrow{bf16(u(1, {s, 1, 2, 4})),
                            single(time_steps(u(2, {s, 1, 2}), bias, {})),
                            at::tensor({-1.0f, -8.0f}),
                            bf16(u(4, {s, 1, 1, 8})),
                            bf16(u(5, {s, 1, 1, 8})),
                            single(u(6, {2})),
                            {}};
  const ScanOperands exact{wide(narrow.x),
                           wide(narrow.dt),
                           wide(narrow.A),
                           wide(narrow.B),
                           wide(narrow.C),
                           wide(narrow.D),
                           {}};
  const at::Tensor expected = ssd_scan(exact, {}, 128).y;
  const auto error = [&](const at::Tensor& y) {
    return (wide(y) - expected).narrow(0, s / 2, s / 2).norm().item<double>();
  };
  const double of_steps = error(ssd_steps(narrow, {}).y),
               of_scan = error(ssd_scan(narrow, {}, 128).y);
  EXPECT_LT(of_steps, 1.1 * of_scan);
  // With a state that is kept in bf16, for comparison.
  ScanState kept;
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < s; ++t) {
    const auto row = [&](const at::Tensor& all) { return all.narrow(0, t, 1); };
    const ScanResult step = ssd_steps(
        {row(narrow.x), row(narrow.dt), narrow.A, row(narrow.B), row(narrow.C), narrow.D, {}},
        kept);
    kept.state = single(bf16(step.state));
    rows.push_back(step.y);
  }
  const double of_bf16 = error(at::cat(rows));
  std::cout << "error of the second half of " << s
            << " decoded steps over the scan's: " << of_steps / of_scan << ", with states in bf16 "
            << of_bf16 / of_scan << "\n";
  EXPECT_GT(of_bf16, 1.2 * of_scan);
  EXPECT_LT(of_scan, 0.003 * expected.narrow(0, s / 2, s / 2).norm().item<double>());
}

// Two runs have the same bits, and so has a sequence beside another one.
TEST(SsdScan, BitsDoNotDependOnTheBatch) {
  const ScanCase c;
  const auto first = [](const at::Tensor& t) { return t.narrow(1, 0, 1); };
  const ScanOperands& o = c.operands;
  const ScanOperands alone{first(o.x), first(o.dt), o.A,          first(o.B),
                           first(o.C), o.D,         first(o.runs)};
  const ScanResult both = ssd_scan(o, {}, 16);
  EXPECT_TRUE(at::equal(both.y, ssd_scan(o, {}, 16).y));
  EXPECT_TRUE(at::equal(first(both.y), ssd_scan(alone, {}, 16).y));
  const ScanGrads grads = ssd_scan_backward(c.dy, {}, o, {}, 16);
  EXPECT_TRUE(at::equal(grads.A, ssd_scan_backward(c.dy, {}, o, {}, 16).A));
  EXPECT_TRUE(at::equal(first(grads.B), ssd_scan_backward(first(c.dy), {}, alone, {}, 16).B));
}

TEST(SsdScan, TypesOfResults) {
  const ScanCase c;
  ScanOperands o = c.operands;
  for (at::Tensor* t : {&o.x, &o.B, &o.C}) *t = t->to(at::kBFloat16);
  for (at::Tensor* t : {&o.dt, &o.A, &o.D}) *t = t->to(at::kFloat);
  const ScanResult result = ssd_scan(o, {}, 16);
  EXPECT_EQ(result.y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(result.state.scalar_type(), at::kFloat);
  const ScanGrads grads = ssd_scan_backward(c.dy.to(at::kBFloat16), {}, o, {}, 16);
  EXPECT_EQ(grads.B.scalar_type(), at::kBFloat16);
  EXPECT_EQ(grads.dt.scalar_type(), at::kFloat);
  EXPECT_EQ(grads.D.scalar_type(), at::kFloat);
}

}  // namespace
}  // namespace megatron
