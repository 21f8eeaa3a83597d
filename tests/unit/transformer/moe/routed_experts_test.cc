// Routed experts over ranks as threads against a loop over tokens on one rank, in fp64.
#include "megatron/transformer/moe/routed_experts.h"

#include <ATen/Context.h>

#include <set>

#include "megatron/comm/peer_rows.h"
#include "megatron/nn/recompute.h"
#include "tests/unit/error_of.h"
#include "tests/unit/transformer/moe/experts_testing.h"

namespace megatron {
namespace {

constexpr int64_t kExperts = 8, kIn = 6, kFfn = 4;

RoutedExpertsOptions small_options(Activation kind = Activation::kSwiglu, bool bias = false) {
  RoutedExpertsOptions options;
  options.mlp.num_experts = kExperts;
  options.mlp.input_size = kIn;
  options.mlp.ffn_size = kFfn;
  options.mlp.activation.kind = kind;
  options.mlp.bias = bias;
  return options;
}

// Memory that was not written holds NaN.
class PoisonedMemory {
 public:
  PoisonedMemory() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }
  ~PoisonedMemory() { at::globalContext().setDeterministicAlgorithms(false, false); }
};

// Weight gradients of a rank against its pieces of the whole ones, summed over the copies.
void expect_grads(RoutedExperts& experts, const AssigningStore& store, const ParallelGroups& groups,
                  const ExpertsPass& expected, int uses, const std::string& what) {
  experts.visit([&](const std::string& name, Parameter& parameter) {
    at::Tensor grad = store.grad(parameter).clone();
    groups.edp.all_reduce(grad)->wait();
    expect_close(grad, local_pieces(parameter, groups, expected.grads.at(name)),
                 what + ", gradient of " + name);
    EXPECT_EQ(store.ready(parameter), uses) << what << ", " << name;
  });
  EXPECT_EQ(store.acquired(), 0) << what;
}

// One micro-batch on a mesh, against the reference on all its tokens.
void expect_equals_loop(const RoutedExpertsOptions& options, const ExpertMesh& mesh,
                        const ExpertTokens& tokens, const std::string& what) {
  const ExpertsPass expected = reference_pass(options, tokens);
  run_ranks(mesh.size(), [&](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = groups_of(mesh, backend);
    const int rank = groups.world.rank();
    const std::string where = cat(what, ", ", mesh.text(), ", rank ", rank);
    RoutedExperts experts(options, groups);
    const AssigningStore store(experts, groups, at::kDouble);
    const RankPass pass = run_experts(experts, tokens, rank);
    expect_close(pass.y, tokens.part(expected.y, rank), where + ", y");
    expect_close(pass.dx, tokens.part(expected.dx, rank), where + ", dx");
    expect_close(pass.dweights, tokens.part(expected.dweights, rank), where + ", dw");
    expect_grads(experts, store, groups, expected, 1, where);
  });
}

// Unequal numbers of tokens, the second rank with none.
std::vector<int64_t> uneven(int ranks) {
  std::vector<int64_t> rows;
  for (int r = 0; r < ranks; ++r) rows.push_back(r == 1 ? 0 : 5 + 3 * r);
  return rows;
}
int64_t sum_of(const std::vector<int64_t>& rows) {
  int64_t sum = 0;
  for (int64_t n : rows) sum += n;
  return sum;
}

const std::vector<ExpertMesh> kMeshes = {{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {1, 2, 1},
                                         {2, 2, 1}, {2, 1, 2}, {2, 2, 2}};
constexpr TokenDispatcherType kDispatchers[] = {
    TokenDispatcherType::kAlltoall, TokenDispatcherType::kAllgather, TokenDispatcherType::kFlex};

std::string text(TokenDispatcherType type) {
  return type == TokenDispatcherType::kAlltoall    ? "alltoall"
         : type == TokenDispatcherType::kAllgather ? "allgather"
                                                   : "flex";
}

TEST(RoutedExperts, EqualsALoopOverTokens) {
  const PoisonedMemory poisoned;
  for (const ExpertMesh& mesh : kMeshes) {
    const std::vector<int64_t> rows = uneven(mesh.size());
    const ExpertTokens tokens =
        draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 3, kExperts, mesh.ep));
    for (const TokenDispatcherType type : kDispatchers) {
      for (const Activation kind :
           {Activation::kSwiglu, Activation::kQuickGeglu, Activation::kGelu}) {
        RoutedExpertsOptions options = small_options(kind, /*bias=*/false);
        options.dispatcher = type;
        expect_equals_loop(options, mesh, tokens, text(type));
      }
    }
  }
}

TEST(RoutedExperts, BiasesClampAndOffset) {
  const PoisonedMemory poisoned;
  for (const ExpertMesh& mesh : kMeshes) {
    if (mesh.etp > 1) continue;
    const std::vector<int64_t> rows = uneven(mesh.size());
    const ExpertTokens tokens =
        draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 3, kExperts, mesh.ep));
    for (const TokenDispatcherType type : kDispatchers) {
      RoutedExpertsOptions options = small_options(Activation::kQuickGeglu, /*bias=*/true);
      options.dispatcher = type;
      options.mlp.activation.offset = 1.0;
      options.mlp.activation.clamp = 0.8;
      expect_equals_loop(options, mesh, tokens, text(type) + " clamped");
      expect_equals_loop(small_options(Activation::kSquaredRelu, true), mesh, tokens,
                         "squared ReLU");
    }
  }
}

TEST(RoutedExperts, EveryLoad) {
  const PoisonedMemory poisoned;
  for (const ExpertMesh& mesh : {ExpertMesh{1, 1, 1}, ExpertMesh{4, 1, 1}, ExpertMesh{2, 2, 1}}) {
    for (const Load load : kLoads) {
      const std::vector<int64_t> rows = uneven(mesh.size());
      const int64_t hot = load == Load::kOneExpert ? 5 : mesh.ep - 1;
      const ExpertTokens tokens =
          draw_tokens(rows, kIn, draw_choices(load, sum_of(rows), 2, kExperts, mesh.ep, hot));
      for (const TokenDispatcherType type : kDispatchers) {
        for (const double factor : {0.0, 1.0, 1.5}) {
          RoutedExpertsOptions options = small_options();
          options.dispatcher = type;
          options.rank_capacity_factor = factor;
          options.mlp.recompute_activation = factor == 1.0;
          expect_equals_loop(options, mesh, tokens,
                             cat(text(type), ", load ", static_cast<int>(load), ", F ", factor));
        }
      }
    }
  }
}

// What a token's sum starts with; the exchange starts before it is known.
TEST(RoutedExperts, AddTheirBase) {
  const std::vector<int64_t> rows = uneven(4);
  const ExpertTokens tokens =
      draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 2, kExperts, 2));
  for (const TokenDispatcherType type : kDispatchers) {
    for (const bool early : {false, true}) {
      RoutedExpertsOptions options = small_options();
      options.dispatcher = type;
      options.exchange_early = early;
      const ExpertsPass expected = reference_pass(options, tokens);
      run_ranks(4, [&](const std::shared_ptr<Backend>& backend) {
        const ParallelGroups groups = groups_of({2, 2, 1}, backend);
        const int rank = groups.world.rank();
        RoutedExperts experts(options, groups);
        const AssigningStore store(experts, groups, at::kDouble);
        const at::Tensor x = tokens.part(tokens.x, rank).clone().set_requires_grad(true);
        const Routing routing{
            tokens.part(tokens.choices, rank), tokens.part(tokens.weights, rank), {}, {}};
        RoutedExperts::Pass pass = experts.begin(x, routing);
        const at::Tensor y = experts.end(std::move(pass), 3.0 * x);
        const at::Tensor dy = tokens.part(tokens.dy, rank);
        torch::autograd::backward({y}, {dy});
        expect_close(y, tokens.part(expected.y, rank) + 3.0 * x, text(type) + ", y");
        expect_close(x.grad(), tokens.part(expected.dx, rank) + 3.0 * dy, text(type) + ", dx");
        expect_grads(experts, store, groups, expected, 1, text(type));
      });
    }
  }
}

TEST(RoutedExperts, AllExpertsAreChosen) {
  const std::vector<int64_t> rows = {3, 0, 2, 4};
  const ExpertTokens tokens =
      draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), kExperts, kExperts, 4));
  for (const TokenDispatcherType type : kDispatchers) {
    RoutedExpertsOptions options = small_options();
    options.dispatcher = type;
    expect_equals_loop(options, {4, 1, 1}, tokens, text(type));
    expect_equals_loop(options, {2, 2, 1}, tokens, text(type));
  }
}

TEST(RoutedExperts, DroppedChoicesAndRanksWithoutTokens) {
  const PoisonedMemory poisoned;
  for (const std::vector<int64_t>& rows :
       {std::vector<int64_t>{6, 5, 0, 7}, std::vector<int64_t>{0, 0, 0, 4},
        std::vector<int64_t>{0, 0, 0, 0}}) {
    at::Tensor choices = draw_choices(Load::kZipf, sum_of(rows), 3, kExperts, 4);
    for (int64_t i = 0; i < choices.size(0); ++i) {
      choices[i][i % 3] = -1;
      if (i % 4 == 0) choices[i].fill_(-1);
    }
    const ExpertTokens tokens = draw_tokens(rows, kIn, choices);
    for (const TokenDispatcherType type : kDispatchers) {
      for (const double factor : {0.0, 1.0}) {
        RoutedExpertsOptions options = small_options(Activation::kSwiglu, /*bias=*/true);
        options.dispatcher = type;
        options.rank_capacity_factor = factor;
        expect_equals_loop(options, {4, 1, 1}, tokens, text(type));
      }
    }
    ExpertTokens all = tokens;
    all.of_rank = {sum_of(rows)};
    expect_equals_loop(small_options(Activation::kSwiglu, true), {1, 1, 1}, all, "one rank");
  }
}

// Every expert has as many rows of each rank, some of them with weight 0.
TEST(RoutedExperts, PaddingChangesNoResult) {
  const PoisonedMemory poisoned;
  for (const ExpertMesh& mesh : kMeshes) {
    const std::vector<int64_t> rows = uneven(mesh.size());
    for (const int64_t k : {1, 3}) {
      const ExpertTokens all =
          draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), k, kExperts, mesh.ep));
      for (const double capacity : {0.7, 1.5, 100.0}) {
        const ExpertTokens tokens = padded_to_capacity(all, kExperts, capacity);
        ASSERT_TRUE(tokens.padding.any().item<bool>());
        for (const TokenDispatcherType type : kDispatchers) {
          RoutedExpertsOptions options = small_options(Activation::kSwiglu, mesh.etp == 1);
          options.dispatcher = type;
          options.weights_on_input = k == 1;
          options.rank_capacity_factor = capacity == 1.5 ? 1.0 : 0.0;
          expect_equals_loop(options, mesh, tokens, cat(text(type), ", capacity ", capacity));
        }
      }
    }
  }
}

TEST(RoutedExperts, WeightsOnTheInput) {
  const std::vector<int64_t> rows = uneven(4);
  const ExpertTokens tokens =
      draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 1, kExperts, 4));
  for (const TokenDispatcherType type : kDispatchers) {
    RoutedExpertsOptions options = small_options(Activation::kSwiglu, /*bias=*/true);
    options.dispatcher = type;
    options.weights_on_input = true;
    expect_equals_loop(options, {4, 1, 1}, tokens, text(type));
  }
}

// Another rank is hot in every micro-batch; gradients are assigned first and then added.
TEST(RoutedExperts, GradientsOfSeveralMicroBatches) {
  const ExpertMesh mesh{4, 1, 1};
  for (const bool deferring : {false, true}) {
    for (const double factor : {0.0, 1.25}) {
      RoutedExpertsOptions options = small_options(Activation::kSwiglu, /*bias=*/true);
      options.rank_capacity_factor = factor;
      const std::vector<int64_t> rows = {4, 5, 0, 6};
      std::vector<ExpertTokens> batches;
      ExpertsPass expected;
      for (int64_t hot = 0; hot < 4; ++hot) {
        batches.push_back(draw_tokens(
            rows, kIn, draw_choices(Load::kOneRank, sum_of(rows), 2, kExperts, 4, hot)));
        for (const auto& [name, grad] : reference_pass(options, batches.back()).grads) {
          at::Tensor& sum = expected.grads[name];
          sum = sum.defined() ? sum + grad : grad;
        }
      }
      run_ranks(mesh.size(), [&](const std::shared_ptr<Backend>& backend) {
        const ParallelGroups groups = groups_of(mesh, backend);
        RoutedExperts experts(options, groups);
        AssigningStore store(experts, groups, at::kDouble, deferring);
        for (const ExpertTokens& tokens : batches)
          run_experts(experts, tokens, groups.world.rank());
        store.run();
        expect_grads(experts, store, groups, expected, 4,
                     cat("deferring ", deferring, " F ", factor, " rank ", groups.world.rank()));
      });
    }
  }
}

// y, dx and dw of all ranks one after the other.
std::vector<at::Tensor> bits_of(const RoutedExpertsOptions& options, const ExpertMesh& mesh,
                                const ExpertTokens& tokens, at::ScalarType type) {
  std::vector<std::vector<at::Tensor>> parts(3, std::vector<at::Tensor>(mesh.size()));
  std::map<std::string, at::Tensor> grads;
  std::mutex mutex;
  run_ranks(mesh.size(), [&](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = groups_of(mesh, backend);
    const int rank = groups.world.rank();
    RoutedExperts experts(options, groups);
    const AssigningStore store(experts, groups, type);
    const RankPass pass = run_experts(experts, tokens, rank, type);
    const std::lock_guard lock(mutex);
    parts[0][rank] = pass.y;
    parts[1][rank] = pass.dx;
    parts[2][rank] = pass.dweights;
    experts.visit([&](const std::string& name, Parameter& parameter) {
      grads[cat(name, " ", rank)] = store.grad(parameter).clone();
    });
  });
  std::vector<at::Tensor> result;
  for (const auto& part : parts) result.push_back(at::cat(part));
  for (const auto& [name, grad] : grads) result.push_back(grad);
  return result;
}

TEST(RoutedExperts, SameBitsInEveryRun) {
  const std::vector<int64_t> rows = uneven(4);
  const ExpertTokens tokens =
      draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 3, kExperts, 2));
  for (const TokenDispatcherType type : kDispatchers) {
    RoutedExpertsOptions options = small_options();
    options.dispatcher = type;
    const auto once = bits_of(options, {2, 2, 1}, tokens, at::kBFloat16),
               twice = bits_of(options, {2, 2, 1}, tokens, at::kBFloat16);
    for (size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::equal(once[i], twice[i])) << i;
  }
}

// Whether rows travel by collectives or are written to their places changes no bit.
TEST(RoutedExperts, SameBitsByAlltoallAndFlex) {
  for (const ExpertMesh& mesh : {ExpertMesh{4, 1, 1}, ExpertMesh{2, 2, 1}, ExpertMesh{1, 2, 2}}) {
    const std::vector<int64_t> rows = uneven(mesh.size());
    for (const Load load : kLoads) {
      const ExpertTokens tokens =
          draw_tokens(rows, kIn, draw_choices(load, sum_of(rows), 3, kExperts, mesh.ep));
      for (const double factor : {0.0, 1.0}) {
        RoutedExpertsOptions options = small_options(Activation::kSwiglu, mesh.etp == 1);
        options.rank_capacity_factor = factor;
        const auto alltoall = bits_of(options, mesh, tokens, at::kBFloat16);
        options.dispatcher = TokenDispatcherType::kFlex;
        options.exchange_early = true;
        const auto flex = bits_of(options, mesh, tokens, at::kBFloat16);
        ASSERT_EQ(alltoall.size(), flex.size());
        for (size_t i = 0; i < flex.size(); ++i)
          EXPECT_TRUE(at::equal(alltoall[i], flex[i])) << mesh.text() << ", tensor " << i;
      }
    }
  }
}

// Outwards a token travels once to each rank of its choices, with a place and a weight of each in
// the forward, and with nothing in the backward; back travel the rows of all choices.
TEST(RoutedExperts, FlexSendsATokenOnceToEachRank) {
  for (const ExpertMesh& mesh : {ExpertMesh{4, 1, 1}, ExpertMesh{2, 2, 1}, ExpertMesh{1, 2, 1}}) {
    const std::vector<int64_t> rows = uneven(mesh.size());
    const ExpertTokens tokens =
        draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 5, kExperts, mesh.ep));
    run_ranks(mesh.size(), [&](const std::shared_ptr<Backend>& backend) {
      const ParallelGroups groups = groups_of(mesh, backend);
      RoutedExpertsOptions options = small_options();
      options.dispatcher = TokenDispatcherType::kFlex;
      RoutedExperts experts(options, groups);
      const AssigningStore store(experts, groups, at::kDouble);
      const auto memory = expert_groups(groups).memory;
      const int rank = groups.world.rank(), part = rank / mesh.etp;
      run_experts(experts, tokens, rank);
      int64_t once = 0, choices = 0, returned = 0;
      for (int source = 0; source < mesh.size(); ++source) {
        const at::Tensor own = tokens.part(tokens.choices, source);
        for (int64_t i = 0; i < own.size(0); ++i) {
          std::set<int64_t> parts;
          for (int64_t j = 0; j < own.size(1); ++j) {
            const int64_t to = own[i][j].item<int>() / (kExperts / mesh.ep);
            const int peers = mesh.etp - (to == part ? 1 : 0);  // ranks of the part but this one
            if (source == rank) choices += peers;
            if (source == rank && parts.insert(to).second) once += peers;
            if (source != rank && to == part) ++returned;
          }
        }
      }
      const int64_t number = sizeof(double), row = kIn * number;
      EXPECT_EQ(memory->bytes_sent(),
                2 * once * row + choices * 2 * number + returned * (2 * row + number))
          << mesh.text() << ", rank " << rank;
    });
  }
}

// Rounds bound memory and change no bit of y; where experts lie changes none, nor what recomputes.
TEST(RoutedExperts, SameOutputInRoundsAndOnOtherMeshes) {
  const std::vector<int64_t> rows = {5, 0, 11, 14};
  for (const auto type : {at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const Load load : {Load::kZipf, Load::kOneRank, Load::kOneExpert}) {
      const ExpertTokens tokens =
          draw_tokens(rows, kIn, draw_choices(load, sum_of(rows), 2, kExperts, 4, 1));
      for (const TokenDispatcherType dispatcher : kDispatchers) {
        RoutedExpertsOptions options = small_options(Activation::kSwiglu, /*bias=*/true);
        options.dispatcher = dispatcher;
        const auto whole = bits_of(options, {4, 1, 1}, tokens, type);
        options.mlp.recompute_activation = true;
        options.rank_capacity_factor = 1.0;
        const auto rounds = bits_of(options, {4, 1, 1}, tokens, type);
        const size_t same = dispatcher == TokenDispatcherType::kAlltoall ? 3 : 1;
        for (size_t i = 0; i < same; ++i)
          EXPECT_TRUE(at::equal(whole[i], rounds[i]))
              << i << " " << text(dispatcher) << " " << c10::toString(type) << " load "
              << static_cast<int>(load);
        if (dispatcher == TokenDispatcherType::kAllgather) continue;
        ExpertTokens all = tokens;
        all.of_rank = {sum_of(rows)};
        options.rank_capacity_factor = 0.0;
        const auto one = bits_of(options, {1, 1, 1}, all, type);
        for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(whole[i], one[i])) << i;
      }
    }
  }
}

TEST(RoutedExperts, RunsAgainOnATape) {
  const ExpertMesh mesh{2, 1, 1};
  const RoutedExpertsOptions options = small_options();
  const std::vector<int64_t> rows = {7, 3};
  const ExpertTokens tokens =
      draw_tokens(rows, kIn, draw_choices(Load::kZipf, sum_of(rows), 2, kExperts, 2));
  const ExpertsPass expected = reference_pass(options, tokens);
  run_ranks(mesh.size(), [&](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = groups_of(mesh, backend);
    const int rank = groups.world.rank();
    RoutedExperts experts(options, groups);
    const AssigningStore store(experts, groups, at::kDouble);
    RecomputeTape tape;
    const at::Tensor x = tokens.part(tokens.x, rank).clone().set_requires_grad(true);
    const at::Tensor y = tape.run(
        [&](const at::Tensor& in) {
          const Routing routing{
              tokens.part(tokens.choices, rank), tokens.part(tokens.weights, rank), {}, {}};
          return experts.forward(in, routing);
        },
        x);
    tape.backward(y, tokens.part(tokens.dy, rank));
    expect_close(y, tokens.part(expected.y, rank), "y");
    expect_close(x.grad(), tokens.part(expected.dx, rank), "dx");
    expect_grads(experts, store, groups, expected, 1, cat("rank ", rank));
  });
}

// Golden values were computed with NumPy from the formulas in the headers.
TEST(RoutedExperts, GoldenValues) {
  RoutedExpertsOptions options;
  options.mlp.num_experts = 3;
  options.mlp.input_size = options.mlp.ffn_size = 2;
  const at::TensorOptions wide = at::dtype(at::kDouble);
  const at::Tensor w1 = at::empty({3, 4, 2}, wide), w2 = at::empty({3, 2, 2}, wide);
  for (int e = 0; e < 3; ++e) {
    for (int c = 0; c < 2; ++c) {
      for (int r = 0; r < 4; ++r) w1[e][r][c] = ((e + 2 * r + 3 * c) % 5 - 2) / 4.0;
      for (int r = 0; r < 2; ++r) w2[e][r][c] = ((2 * e + r + 4 * c) % 7 - 3) / 4.0;
    }
  }
  const at::Tensor x = at::tensor({1.0, 2.0, -1.0, 0.5, 0.5, -2.0}, wide).view({3, 2});
  const at::Tensor choices = at::tensor({1, 0, 2, 1, 0, 2}, at::kInt).view({3, 2});
  const at::Tensor logits =
      at::tensor({2.0, 1.0, 0.75, 0.5, 0.5, -1.25}, wide).view({3, 2}).set_requires_grad(true);
  const at::Tensor dy = at::tensor({1.0, -1.0, 0.5, 2.0, -1.0, 1.0}, wide).view({3, 2});
  const at::Tensor y[] = {
      at::tensor({0.046452213, -0.08713755, -0.036341268, -0.037871881, -0.173676191, -0.388847388},
                 wide)
          .view({3, 2}),
      at::tensor({0.219558071, -0.18713755, 0.219876383, -0.137871881, -0.044066752, -0.488847388},
                 wide)
          .view({3, 2})};
  const at::Tensor dlogits =
      at::tensor({0.02236604, -0.02236604, -0.01166302, 0.01166302, -0.00466659, 0.00466659}, wide)
          .view({3, 2});
  for (const bool bias : {false, true}) {
    options.mlp.bias = bias;
    const ParallelGroups one;
    RoutedExperts experts(options, one);
    const AssigningStore store(experts, one, at::kDouble);
    experts.visit([&](const std::string& name, Parameter& parameter) {
      if (name == "linear_fc1.weight") parameter.value.copy_(w1);
      if (name == "linear_fc2.weight") parameter.value.copy_(w2);
      if (name == "linear_fc1.bias") parameter.value.zero_();
      if (name == "linear_fc2.bias")
        parameter.value.copy_(at::tensor({0.1, -0.1, 0.2, -0.1, 0.3, -0.1}, wide).view({3, 2}));
    });
    const at::Tensor result = experts.forward(x, {choices, at::softmax(logits, -1), {}, {}});
    expect_close(result, y[bias], "y", 1e-8);
    if (bias) continue;
    torch::autograd::backward({result}, {dy});
    expect_close(logits.grad(), dlogits, "gradient of the logits", 1e-8);
  }
}

TEST(RoutedExperts, RefusesWhatDoesNotDivide) {
  run_ranks(3, [&](const std::shared_ptr<Backend>& backend) {
    RoutedExpertsOptions options = small_options(Activation::kSwiglu, /*bias=*/true);
    const ParallelGroups groups = groups_of({3, 1, 1}, backend);
    EXPECT_EQ(error_of([&] { RoutedExperts(options, groups); }),
              "8 experts are not divisible by 3 expert-parallel ranks");
    const ParallelGroups divided = groups_of({1, 3, 1}, backend);
    EXPECT_EQ(error_of([&] { RoutedExperts(options, divided); }),
              "experts with biases are not divided over expert-tensor ranks");
    options.mlp.bias = false;
    EXPECT_EQ(error_of([&] { RoutedExperts(options, divided); }),
              "the width 4 of an expert is not divisible by 3 expert-tensor ranks");
  });
}

}  // namespace
}  // namespace megatron
