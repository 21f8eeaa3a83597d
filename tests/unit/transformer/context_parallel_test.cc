// Context parallelism against attention on one rank: all types, outputs and gradients, in fp64 and
// fp32.
#include "megatron/transformer/context_parallel/context_parallel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/transformer_block.h"
#include "tests/unit/error_of.h"
#include "tests/unit/forwarding_backend.h"

namespace megatron {
namespace {

constexpr auto kP2P = ContextParallelType::kP2P;
constexpr auto kAllGather = ContextParallelType::kAllGather;
constexpr auto kA2A = ContextParallelType::kA2A;
constexpr auto kA2AP2P = ContextParallelType::kA2AP2P;

at::Tensor draw_normal(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::dtype(at::kDouble));
}

double distance(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type()) return 1e300;
  const at::Tensor a = got.to(at::kDouble), b = expected.to(at::kDouble);
  const double error = (a - b).norm().item<double>() / b.norm().item<double>();
  return error == error ? error : 1e300;
}

// Counts the bytes that this rank sends.
class CountingBackend final : public ForwardingBackend {
 public:
  CountingBackend(std::shared_ptr<Backend> inner, std::shared_ptr<int64_t> bytes)
      : ForwardingBackend(std::move(inner)), bytes_(std::move(bytes)) {}
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    ADD_FAILURE() << "all_reduce";
    return inner_->all_reduce(tensor, op);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    *bytes_ += static_cast<int64_t>(input.nbytes()) * (size() - 1);
    return inner_->all_gather(output, input);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    *bytes_ += static_cast<int64_t>(output.nbytes()) * (size() - 1);
    return inner_->reduce_scatter(output, input, op);
  }
  std::shared_ptr<Work> all_to_all(at::Tensor output, std::vector<int64_t> output_sizes,
                                   at::Tensor input, std::vector<int64_t> input_sizes) override {
    *bytes_ += static_cast<int64_t>(input.nbytes()) / size() * (size() - 1);
    return inner_->all_to_all(output, output_sizes, input, input_sizes);
  }
  std::shared_ptr<Work> broadcast(at::Tensor tensor, int root) override {
    ADD_FAILURE() << "broadcast";
    return inner_->broadcast(tensor, root);
  }
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    *bytes_ += static_cast<int64_t>(tensor.nbytes());
    return inner_->send(tensor, peer);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<CountingBackend>(inner_->subgroup(ranks, name, use), bytes_);
  }

 private:
  std::shared_ptr<int64_t> bytes_;
};

struct Layout {
  const char* name;
  ContextParallelType type;
  int c;
  std::vector<int64_t> levels = {};
};

struct Case {
  const char* name;
  int64_t n, g;
  bool documents = false;
  double dropout = 0.0;
  int64_t window = -1;
  bool causal = true, recompute = false;
  int64_t value_width = 4;
  bool sinks = false;
  bool distances = false;
};

void PrintTo(const Layout& l, std::ostream* out) { *out << l.name; }
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

constexpr int64_t kLength = 24, kBatch = 2, kWidth = 4;

struct Problem {
  at::Tensor q, k, v, dout, documents;
  AttentionOptions options;
};

Problem make_problem(const Case& c, at::ScalarType type) {
  Problem p;
  p.q = draw_normal({kLength, kBatch, c.n, kWidth}, 1).to(type);
  // Strided views, as the projection gives them.
  const at::Tensor packed = draw_normal({kLength, kBatch, c.g, kWidth + c.value_width}, 2).to(type);
  p.k = packed.narrow(3, 0, kWidth);
  p.v = packed.narrow(3, kWidth, c.value_width);
  p.dout = draw_normal({kLength, kBatch, c.n, c.value_width}, 3).to(type);
  if (c.documents)  // borders inside chunks and on them, other ones in each sample
    p.documents = at::stack({at::bucketize(at::arange(kLength), at::tensor({0, 5, 11, 16})),
                             at::bucketize(at::arange(kLength), at::tensor({2, 20}))});
  p.options.causal = c.causal;
  p.options.scale = 0.6;
  p.options.window_left = c.window;
  p.options.recompute = c.recompute;
  p.options.first_head = 3;
  if (c.sinks) p.options.sinks = draw_normal({c.n}, 4).to(type);
  if (c.distances) p.options.distance_bias = draw_normal({c.n, 2 * kLength - 1}, 4).to(type);
  if (c.dropout > 0) {
    p.options.dropout = c.dropout;
    p.options.key = random_key(1, "attention", 2);
    p.options.place.sample = at::tensor({5, 9}, at::kLong);
  }
  return p;
}

// out, dq, dk, dv, and with sinks or a bias by distance its gradient
using Tensors = std::vector<at::Tensor>;

Tensors attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout,
    AttentionOptions options,
    const std::function<at::Tensor(const Tensors&, const AttentionOptions&)>& attention) {
  Tensors leaves = {q.detach().requires_grad_(), k.detach().requires_grad_(),
                    v.detach().requires_grad_()};
  for (at::Tensor* more : {&options.sinks, &options.distance_bias})
    if (more->defined()) *more = more->detach().requires_grad_();
  const at::Tensor out = attention(leaves, options);
  torch::autograd::backward({out}, {dout});
  Tensors all = {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
  for (const at::Tensor& more : {options.sinks, options.distance_bias})
    if (more.defined()) all.push_back(more.grad());
  return all;
}

Tensors serial(const Problem& p) {
  AttentionOptions options = p.options;
  options.place.position = options.key_position = at::arange(kLength);
  if (p.documents.defined())
    options.mask = p.documents.unsqueeze(2).ne(p.documents.unsqueeze(1)).unsqueeze(1);
  return attend(p.q, p.k, p.v, p.dout, options, [&](const Tensors& t, const AttentionOptions& o) {
    return core_attention(t[0], t[1], t[2], o);
  });
}

ParallelGroups make_groups(const std::shared_ptr<Backend>& world, const Layout& layout,
                           int64_t tp = 1) {
  ParallelConfig config;
  config.tensor_model_parallel_size = tp;
  config.context_parallel_size = layout.c;
  config.hierarchical_context_parallel_sizes = layout.levels;
  return make_parallel_groups(config, world);
}

// This rank's part of the problem.
Tensors parallel(const Problem& p, const Layout& layout, const ParallelGroups& groups) {
  const auto part = [&](const at::Tensor& t) { return zigzag_slice(t, 0, groups.cp); };
  Tensors all = attend(part(p.q), part(p.k), part(p.v), part(p.dout), p.options,
                       [&](const Tensors& t, const AttentionOptions& o) {
                         return context_parallel_attention(t[0], t[1], t[2], o, p.documents,
                                                           layout.type, groups);
                       });
  if (all.size() > 4) groups.cp.all_reduce(all[4])->wait();
  return all;
}

class ContextParallel : public ::testing::TestWithParam<std::tuple<Layout, Case, at::ScalarType>> {
};

TEST_P(ContextParallel, EqualsOneRank) {
  const auto& [layout, c, type] = GetParam();
  const Problem problem = make_problem(c, type);
  const Tensors expected = serial(problem);
  const double tolerance = type == at::kDouble ? 1e-10 : 1e-5;
  run_ranks(layout.c, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_groups(world, layout);
    const Tensors got = parallel(problem, layout, groups),
                  again = parallel(problem, layout, groups);
    const char* const names[] = {"out", "dq", "dk", "dv", c.sinks ? "dsinks" : "dbias"};
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_LT(distance(got[i], i < 4 ? zigzag_slice(expected[i], 0, groups.cp) : expected[i]),
                tolerance)
          << names[i] << " on rank " << groups.cp.rank();
      EXPECT_TRUE(at::equal(got[i], again[i])) << names[i] << " differs between two runs";
    }
    EXPECT_TRUE(got[0].is_contiguous());
  });
}

const Layout kRings[] = {{"p2p_2", kP2P, 2}, {"p2p_3", kP2P, 3}, {"p2p_4", kP2P, 4}};
const Layout kLevels[] = {{"a2a_p2p_2x2", kA2AP2P, 4, {2, 2}},
                          {"a2a_p2p_4x1", kA2AP2P, 4, {4, 1}},
                          {"a2a_p2p_1x4", kA2AP2P, 4, {1, 4}},
                          {"a2a_p2p_3x2", kA2AP2P, 6, {3, 2}}};
const Layout kWhole[] = {{"all_gather_2", kAllGather, 2},
                         {"all_gather_3", kAllGather, 3},
                         {"all_gather_4", kAllGather, 4},
                         {"a2a_2", kA2A, 2},
                         {"a2a_3", kA2A, 3},
                         {"a2a_4", kA2A, 4}};
const Case kCases[] = {
    {"heads", 12, 12},
    {"grouped", 12, 4},
    {"few_groups", 12, 2},
    {"multi_query", 12, 1},
    {"recompute", 12, 4, false, 0.0, -1, true, true},
    {"bidirectional", 12, 4, false, 0.0, -1, false},
    {"narrow_values", 12, 4, false, 0.0, -1, true, false, 2},
    {"documents", 12, 4, true},
    {"dropout", 12, 4, false, 0.3},
    {"documents_dropout_recompute", 12, 2, true, 0.3, -1, true, true},
    {"sinks", 12, 4, false, 0.0, -1, true, false, 4, true},
    {"sinks_documents_dropout_recompute", 12, 2, true, 0.3, -1, true, true, 4, true},
};
const Case kWindows[] = {
    {"window", 12, 4, false, 0.0, 5},
    {"one_back", 12, 4, false, 0.0, 1},
    {"window_documents_dropout", 12, 1, true, 0.3, 7},
    {"window_sinks", 12, 4, false, 0.0, 5, true, false, 4, true},
};

const Case kDistances[] = {
    {"distances", 12, 12, false, 0.0, -1, true, false, 4, false, true},
    {"distances_bidirectional", 12, 4, false, 0.0, -1, false, false, 4, false, true},
    {"distances_documents_dropout_recompute", 12, 12, true, 0.3, -1, false, true, 4, false, true},
};

std::string name_of(const ::testing::TestParamInfo<ContextParallel::ParamType>& info) {
  const auto& [layout, c, type] = info.param;
  return std::string(layout.name) + "_" + c.name + "_" + c10::toString(type);
}

const auto kTypes = ::testing::Values(at::kDouble, at::kFloat);
INSTANTIATE_TEST_SUITE_P(Ring, ContextParallel,
                         ::testing::Combine(::testing::ValuesIn(kRings),
                                            ::testing::ValuesIn(kCases), kTypes),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Levels, ContextParallel,
                         ::testing::Combine(::testing::ValuesIn(kLevels),
                                            ::testing::ValuesIn(kCases), kTypes),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Whole, ContextParallel,
                         ::testing::Combine(::testing::ValuesIn(kWhole),
                                            ::testing::ValuesIn(kCases), kTypes),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Windows, ContextParallel,
                         ::testing::Combine(::testing::ValuesIn(kWhole),
                                            ::testing::ValuesIn(kWindows), kTypes),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Distances, ContextParallel,
                         ::testing::Combine(::testing::ValuesIn(kWhole),
                                            ::testing::ValuesIn(kDistances), kTypes),
                         name_of);

TEST(ContextParallelPlaces, DropoutAndDocumentsHaveAnEffect) {
  const Case plain{"", 12, 4};
  const Tensors base = serial(make_problem(plain, at::kDouble));
  for (const Case& c :
       {Case{"", 12, 4, true}, Case{"", 12, 4, false, 0.3}, Case{"", 12, 4, false, 0.0, 5}})
    EXPECT_GT(distance(serial(make_problem(c, at::kDouble))[0], base[0]), 1e-3);
}

TEST(ContextParallelPlaces, OneRankTakesDocumentIds) {
  const Problem p = make_problem({"", 12, 4, true}, at::kDouble);
  const Tensors expected = serial(p), got = parallel(p, {"", kP2P, 1}, ParallelGroups());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i]));
}

TEST(ZigZag, PositionsPairEarlyWithLateChunks) {
  EXPECT_TRUE(at::equal(zigzag_positions(12, 3, 0), at::tensor({0, 1, 10, 11}, at::kLong)));
  EXPECT_TRUE(at::equal(zigzag_positions(12, 3, 1), at::tensor({2, 3, 8, 9}, at::kLong)));
  EXPECT_TRUE(at::equal(zigzag_positions(12, 3, 2), at::tensor({4, 5, 6, 7}, at::kLong)));
  EXPECT_TRUE(at::equal(zigzag_positions(5, 1, 0), at::arange(5)));
}

TEST(ZigZag, SliceAndGatherAreInverse) {
  for (const int c : {1, 2, 3}) {
    run_ranks(c, [&](const std::shared_ptr<Backend>& world) {
      const ProcessGroup cp(world, "cp");
      const at::Tensor x = draw_normal({3, 12, 2}, 1).requires_grad_();
      const at::Tensor part = zigzag_slice(x, 1, cp),
                       positions = zigzag_positions(12, c, cp.rank());
      EXPECT_TRUE(at::equal(part, x.index_select(1, positions)));
      EXPECT_TRUE(part.is_contiguous());
      EXPECT_TRUE(at::equal(zigzag_gather(part, 1, cp), x));
      torch::autograd::backward({part}, {at::ones_like(part)});
      EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x).index_fill(1, positions, 1.0)));
    });
  }
}

// Each rank uses the whole sequence, with weights of its own; the gradients are sent in fp32.
TEST(ZigZag, GatheredSequenceSumsGradientsOfAllRanks) {
  for (const int c : {1, 2, 3}) {
    const at::Tensor x = draw_normal({12, 3, 2}, 1), weights = draw_normal({c, 12, 3, 2}, 2);
    for (const at::ScalarType type : {at::kDouble, at::kBFloat16}) {
      run_ranks(c, [&](const std::shared_ptr<Backend>& world) {
        const auto bytes = std::make_shared<int64_t>(0);
        const ProcessGroup cp(std::make_shared<CountingBackend>(world, bytes), "cp");
        const at::Tensor part = zigzag_slice(x.to(type), 0, cp).clone().requires_grad_();
        const at::Tensor whole = gather_sequence(part, cp);
        EXPECT_TRUE(at::equal(whole, x.to(type)));
        EXPECT_EQ(*bytes, (c - 1) * static_cast<int64_t>(part.nbytes()));
        torch::autograd::backward({whole}, {weights[cp.rank()].to(type)});
        const at::ScalarType sums = type == at::kDouble ? at::kDouble : at::kFloat;
        const at::Tensor expected = zigzag_slice(weights.to(type).to(sums).sum(0).to(type), 0, cp);
        EXPECT_LT(distance(part.grad(), expected), type == at::kDouble ? 1e-15 : 1e-3);
        EXPECT_EQ(*bytes, (c - 1) * part.numel() *
                              static_cast<int64_t>(at::elementSize(type) + at::elementSize(sums)));
      });
    }
  }
}

TEST(ZigZag, RefusesLengthsThatDoNotDivide) {
  EXPECT_EQ(error_of([] { zigzag_positions(18, 4, 0); }),
            "a sequence of 18 tokens is not divisible by 8, twice --context-parallel-size 4\n"
            "hint: --seq-length 16 or another multiple of 8");
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const ProcessGroup cp(world, "cp");
    EXPECT_EQ(error_of([&] { zigzag_slice(at::zeros({6}), 0, cp); }),
              "a sequence of 6 tokens is not divisible by 4, twice --context-parallel-size 2\n"
              "hint: --seq-length 4 or another multiple of 4");
    ParallelGroups groups;
    groups.cp = cp;
    const at::Tensor x = at::zeros({3, 1, 2, 4});
    EXPECT_EQ(error_of([&] { context_parallel_attention(x, x, x, {}, {}, kP2P, groups); }),
              "a sequence of 6 tokens is not divisible by 4, twice --context-parallel-size 2\n"
              "hint: --seq-length 4 or another multiple of 4");
  });
}

TEST(ContextParallelRefusal, NamesWhatATypeCannotDo) {
  run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_groups(world, {"", kP2P, 4});
    const auto attempt = [&](int64_t heads, const AttentionOptions& options,
                             ContextParallelType type) {
      const at::Tensor x = at::zeros({4, 1, heads, 4});
      return error_of([&] { context_parallel_attention(x, x, x, options, {}, type, groups); });
    };
    AttentionOptions window;
    window.window_left = 2;
    EXPECT_EQ(attempt(4, window, kP2P),
              "--window-size cannot be used with the ring of --cp-comm-type p2p or a2a+p2p\n"
              "hint: --cp-comm-type all_gather or a2a");
    AttentionOptions distances;
    distances.distance_bias = at::zeros({4, 31});
    EXPECT_EQ(attempt(4, distances, kP2P),
              "relative positions with the ring of --cp-comm-type p2p or a2a+p2p are not built\n"
              "hint: --cp-comm-type all_gather or a2a");
    EXPECT_EQ(attempt(6, {}, kA2A),
              "--cp-comm-type a2a divides heads over 4 context-parallel ranks, but a "
              "tensor-parallel rank has 6 query heads\n"
              "hint: sizes that divide 6: 1, 2, 3, 6; or --cp-comm-type p2p or all_gather");
    EXPECT_EQ(attempt(4, {}, kA2AP2P),
              "--cp-comm-type a2a+p2p needs two levels, got 0\n"
              "hint: --hierarchical-context-parallel-sizes with the sizes of the inner and the "
              "outer level");
    AttentionOptions fused;
    fused.backend = AttentionBackend::kFused;
    EXPECT_EQ(attempt(4, fused, kAllGather),
              "--attention-backend fused cannot compute this block of attention: it needs a CUDA "
              "device\nhint: --attention-backend auto");
  });
}

// A transport without buffers that runs a rank's messages one after the other, as NCCL does: a send
// ends when its receiver has come to it, and a receive when its message is there.
class RendezvousBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  std::shared_ptr<Work> send(at::Tensor tensor, int peer) override {
    auto work = inner_->send(tensor, peer);
    inner_->recv(at::empty({1}), peer)->wait();
    return work;
  }
  std::shared_ptr<Work> recv(at::Tensor tensor, int peer) override {
    auto work = inner_->recv(tensor, peer);
    work->wait();
    inner_->send(at::empty({1}), peer)->wait();
    return work;
  }
};

TEST(ContextParallelRing, NeedsNoBuffersInTheTransport) {
  const Problem p = make_problem({"", 12, 4}, at::kDouble);
  const Tensors expected = serial(p);
  for (const int c : {2, 3, 4}) {
    run_ranks(
        c,
        [&](const std::shared_ptr<Backend>& world) {
          ParallelGroups groups;
          groups.cp = ProcessGroup(std::make_shared<RendezvousBackend>(world), "cp");
          const Tensors got = parallel(p, {"", kP2P, c}, groups);
          for (size_t i = 0; i < got.size(); ++i)
            EXPECT_LT(distance(got[i], zigzag_slice(expected[i], 0, groups.cp)), 1e-10);
        },
        /*timeout_seconds=*/20.0);
  }
}

// Outputs of parts are added in fp32, so that a ring rounds its output once, as one rank does: in
// bf16 with an error of about 2^-9 / sqrt(3) of it, of other origin in each element. Added in bf16
// it would round once for each of the 4 parts.
TEST(ContextParallelRing, RoundsLikeOneRank) {
  const Case c = {"heads", 12, 4};
  const Problem rounded = make_problem(c, at::kBFloat16);
  Problem wide = rounded;
  for (at::Tensor* t : {&wide.q, &wide.k, &wide.v, &wide.dout}) *t = t->to(at::kDouble);
  const Tensors exact = serial(wide), one = serial(rounded);
  const Layout layout = {"p2p_4", kP2P, 4};
  std::mutex mutex;
  std::vector<double> squares(exact.size(), 0.0);  // of the ring's errors
  run_ranks(layout.c, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_groups(world, layout);
    const Tensors got = parallel(rounded, layout, groups);
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < got.size(); ++i)
      squares[i] += (got[i] - zigzag_slice(exact[i], 0, groups.cp)).square().sum().item<double>();
  });
  const char* const names[] = {"out", "dq", "dk", "dv"};
  for (size_t i = 0; i < exact.size(); ++i) {
    const double ratio = std::sqrt(squares[i]) / (one[i] - exact[i]).norm().item<double>();
    EXPECT_LT(ratio, 1.1) << names[i];
  }
}

// The table of docs/parallelism/context.md: e bytes per element, gradients of keys in 4.
TEST(ContextParallelBytes, AreThoseOfTheFormulas) {
  const Case c{"", 12, 2};
  const Problem p = make_problem(c, at::kBFloat16);
  constexpr int64_t e = 2, f = 4;
  struct Expected {
    Layout layout;
    int64_t forward, backward;
  };
  const auto q = [&](int64_t ranks) {
    return kLength / ranks * kBatch * c.n * kWidth;
  };  // elements per rank
  const auto kv = [&](int64_t ranks) { return kLength / ranks * kBatch * c.g * 2 * kWidth; };
  const int64_t exchange4 = (2 * q(4) + 2 * kv(4)) * 3 / 4 * e;  // 2 groups become 4
  const int64_t exchange2 = (2 * q(4) + kv(4)) / 2 * e;          // 2 groups over 2 inner ranks
  for (const Expected& expected : {
           Expected{{"", kP2P, 4}, 3 * kv(4) * e, 3 * kv(4) * e + 4 * kv(4) * f},
           Expected{{"", kAllGather, 4}, 3 * kv(4) * e, 3 * kv(4) * e + 3 * kv(4) * f},
           Expected{{"", kA2A, 4}, exchange4, exchange4},
           Expected{{"", kA2AP2P, 4, {2, 2}},
                    exchange2 + kv(4) * e,
                    exchange2 + kv(4) * e + 2 * kv(4) * f},
       }) {
    run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
      const auto bytes = std::make_shared<int64_t>(0);
      const ParallelGroups groups =
          make_groups(std::make_shared<CountingBackend>(world, bytes), expected.layout);
      int64_t forward = 0;
      const auto part = [&](const at::Tensor& t) { return zigzag_slice(t, 0, groups.cp); };
      attend(part(p.q), part(p.k), part(p.v), part(p.dout), p.options,
             [&](const Tensors& t, const AttentionOptions& options) {
               const at::Tensor out = context_parallel_attention(t[0], t[1], t[2], options, {},
                                                                 expected.layout.type, groups);
               forward = *bytes;
               return out;
             });
      EXPECT_EQ(forward, expected.forward) << "type " << static_cast<int>(expected.layout.type);
      EXPECT_EQ(*bytes - forward, expected.backward)
          << "type " << static_cast<int>(expected.layout.type);
    });
  }
}

TransformerConfig context_config() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 32;
  config.num_attention_heads = 8;
  config.seq_length = 16;
  config.init_method_std = 0.3;
  config.hidden_dropout = config.attention_dropout = 0.2;
  config.position_embedding_type = PositionEmbedding::kRope;
  config.group_query_attention = true;
  config.num_query_groups = 4;
  config.finalize();
  return config;
}

std::string violations_of(const TransformerConfig& model, const ParallelConfig& parallel) {
  Violations violations;
  validate_context_parallel(model, parallel, violations);
  std::string text;
  for (const std::string& message : violations.messages()) text += message + "\n";
  return text;
}

TEST(ContextParallelRefusal, IsSaidAtTheStart) {
  TransformerConfig model = context_config();
  ParallelConfig parallel;
  EXPECT_EQ(violations_of(model, parallel), "");
  parallel.context_parallel_size = 4;
  EXPECT_EQ(violations_of(model, parallel), "");
  model.seq_length = 20;
  EXPECT_EQ(violations_of(model, parallel),
            "a sequence of 20 tokens is not divisible by 8, twice --context-parallel-size 4\n"
            "hint: --seq-length 16 or another multiple of 8\n");
  model.seq_length = 16;
  model.window_size = {3, 0};
  EXPECT_EQ(violations_of(model, parallel),
            "--window-size cannot be used with the ring of --cp-comm-type p2p or a2a+p2p\n"
            "hint: --cp-comm-type all_gather or a2a\n");
  model.cp_comm_type = {"all_gather"};
  EXPECT_EQ(violations_of(model, parallel), "");
  model.window_size = {};
  model.rope_scaling_type = RopeScaling::kLongRope;
  EXPECT_EQ(violations_of(model, parallel),
            "--rope-scaling-type longrope with --context-parallel-size above 1 is not built\n"
            "hint: its factors depend on the last token, which another rank may hold\n");
  model.rope_scaling_type = RopeScaling::kNone;
  model.cp_comm_type = {"p2p", "a2a"};
  parallel.tensor_model_parallel_size = 4;
  EXPECT_EQ(violations_of(model, parallel),
            "--cp-comm-type a2a divides heads over 4 context-parallel ranks, but a tensor-parallel "
            "rank has 2 query heads\n"
            "hint: sizes that divide 2: 1, 2; or --cp-comm-type p2p or all_gather\n");
  model.cp_comm_type = {"a2a+p2p"};
  EXPECT_EQ(violations_of(model, parallel),
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes\n"
            "hint: two sizes whose product is 4, the inner one first\n");
  parallel.hierarchical_context_parallel_sizes = {2, 2};
  EXPECT_EQ(violations_of(model, parallel), "");
}

struct BlockPass {
  at::Tensor y, dx;
  std::map<std::string, at::Tensor> grads;
};

BlockPass run_block(const TransformerConfig& config, const at::Tensor& input, const at::Tensor& dy,
                    const ForwardContext& context, const ParallelGroups& groups,
                    bool sequence_parallel = false) {
  TransformerBlock block(config, 0, config.num_layers, /*final_norm=*/true, sequence_parallel,
                         groups);
  PlainParameterStore store(block, at::kDouble, at::kCPU, true);
  initialize_parameters(block, 3, groups);
  const at::Tensor x = input.clone().requires_grad_();
  const at::Tensor y = block.forward(x, context);
  torch::autograd::backward({y}, {dy});
  BlockPass pass{y.detach(), x.grad(), {}};
  block.visit([&](const std::string& name, Parameter& parameter) {
    pass.grads[name] = store.grad(parameter).clone();
  });
  return pass;
}

// Whole layers with rotary positions, grouped heads, both dropouts and documents, over tensor and
// context ranks.
TEST(ContextParallelBlock, TensorAndContextRanksGiveTheSameResult) {
  TransformerConfig config = context_config();
  const int64_t s = config.seq_length, b = 2;
  const at::Tensor x = draw_normal({s, b, 32}, 1), dy = draw_normal({s, b, 32}, 2);
  ForwardContext context;
  context.training = true;
  context.place.sample = at::tensor({3, 4}, at::kLong);
  context.place.position = at::arange(s);
  context.document_ids = at::stack({at::arange(s) / 5, at::arange(s) / 7}).to(at::kLong);
  const BlockPass expected = run_block(config, x, dy, context, ParallelGroups());
  for (const Layout& layout :
       {Layout{"p2p", kP2P, 2}, Layout{"all_gather", kAllGather, 2}, Layout{"a2a", kA2A, 2},
        Layout{"a2a+p2p", kA2AP2P, 4, {2, 2}}, Layout{"mixed", kP2P, 4}}) {
    for (const int tp : {1, 2}) {
      config.cp_comm_type = {layout.name};
      if (config.cp_comm_type[0] == "mixed") config.cp_comm_type = {"a2a", "p2p"};
      run_ranks(tp * layout.c, [&](const std::shared_ptr<Backend>& world) {
        const ParallelGroups groups = make_groups(world, layout, tp);
        const std::string what = cat(layout.name, ", tp ", tp);
        ForwardContext own = context;
        own.place.position = zigzag_positions(s, layout.c, groups.cp.rank());
        const BlockPass got = run_block(config, zigzag_slice(x, 0, groups.cp),
                                        zigzag_slice(dy, 0, groups.cp), own, groups);
        EXPECT_LT(distance(got.y, zigzag_slice(expected.y, 0, groups.cp)), 1e-10) << what;
        EXPECT_LT(distance(got.dx, zigzag_slice(expected.dx, 0, groups.cp)), 1e-10) << what;
        if (tp > 1) return;
        for (const auto& [name, grad] : got.grads) {
          groups.cp.all_reduce(grad)->wait();
          EXPECT_LT(distance(grad, expected.grads.at(name)), 1e-9) << what << ": " << name;
        }
      });
    }
  }
}

// With sequence parallelism the activations between the linears are a t-th of a context rank's
// tokens.
TEST(ContextParallelBlock, SequenceParallelRanksGiveTheSameResult) {
  TransformerConfig config = context_config();
  config.hidden_dropout = 0.0;
  const int64_t s = config.seq_length, b = 2;
  const at::Tensor x = draw_normal({s, b, 32}, 1), dy = draw_normal({s, b, 32}, 2);
  ForwardContext context;
  context.training = true;
  context.place.sample = at::tensor({3, 4}, at::kLong);
  context.place.position = at::arange(s);
  const BlockPass expected = run_block(config, x, dy, context, ParallelGroups());
  for (const char* type : {"p2p", "all_gather", "a2a"}) {
    config.cp_comm_type = {type};
    run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
      const ParallelGroups groups = make_groups(world, {"", kP2P, 2}, 2);
      ForwardContext own = context;
      own.place.position = zigzag_positions(s, 2, groups.cp.rank());
      const auto rows = [&](const at::Tensor& t) {
        return zigzag_slice(t, 0, groups.cp).chunk(2, 0)[static_cast<size_t>(groups.tp.rank())];
      };
      const BlockPass got =
          run_block(config, rows(x), rows(dy), own, groups, /*sequence_parallel=*/true);
      EXPECT_LT(distance(got.y, rows(expected.y)), 1e-10) << type;
      EXPECT_LT(distance(got.dx, rows(expected.dx)), 1e-10) << type;
    });
  }
}

// Others take them: the layouts of models whose images are seen in both directions.
TEST(ContextParallelBlock, RingsRefuseMasks) {
  TransformerConfig config = context_config();
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_groups(world, {"", kP2P, 2});
    ForwardContext context;
    context.place.position = zigzag_positions(16, 2, groups.cp.rank());
    context.attention_mask = at::zeros({1, 1, 16, 16}, at::kBool);
    const at::Tensor x = draw_normal({8, 1, 32}, 1);
    EXPECT_EQ(error_of([&] { run_block(config, x, x, context, groups); }),
              "an attention mask in a ring of context-parallel ranks is not built\nhint: "
              "--cp-comm-type all_gather or a2a");
  });
}

}  // namespace
}  // namespace megatron
