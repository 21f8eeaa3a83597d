// Losses of a router: the vectors, and equality of value and gradient in many partitions with a
// plain formula over all tokens at once.
#include "megatron/transformer/moe/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "loss_pass.h"
#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "megatron/transformer/moe/router.h"
#include "megatron/transformer/moe/routing_replay.h"
#include "tensors.h"

namespace megatron {
namespace {

const Rows kLogits = {
    {1, .5, -.5, 0}, {.25, .25, .25, .25}, {-1, 2, 1.5, 1.75}, {0, -.25, .75, .5}};

// Rows 0 and 2 are sequence 0, rows 1 and 3 sequence 1.
struct VectorRun {
  std::vector<double> sums, weights;
  at::Tensor grad;
};

VectorRun run_vector(const BalanceOptions& options, const std::vector<double>& token_weights,
                     RouterScore score = RouterScore::kSoftmax, const ParallelGroups& groups = {},
                     std::optional<int64_t> sequence = {}) {
  RouterBalance balance(options, 1, score, 2, /*divides_rows=*/false, groups);
  LossPass pass(options);
  pass.context.tokens.of_sequence = vector(token_weights);
  at::Tensor logits = matrix(kLogits);
  if (sequence) logits = logits.view({2, 2, 4}).select(1, *sequence).contiguous();
  logits.set_requires_grad(true);
  balance.add_losses(logits, LayerContext{pass.context, {}});
  pass.tape.backward((logits * 0).sum());
  VectorRun run;
  for (size_t i = 0; i < pass.names.size(); ++i) {
    run.sums.push_back(pass.totals[static_cast<int64_t>(i)][0].item<double>());
    run.weights.push_back(pass.totals[static_cast<int64_t>(i)][1].item<double>());
  }
  run.grad = logits.grad() / kLossScale;
  return run;
}

TEST(Balance, EqualsTheVectors) {
  const BalanceOptions all{.micro = 1, .sequence = 1, .global = 1, .z = 1};
  const VectorRun full = run_vector(all, {1, 1});
  EXPECT_NEAR(full.sums[0], 4.047347004, 1e-8);
  EXPECT_NEAR(full.sums[1], 4.336049208, 1e-8);
  EXPECT_NEAR(full.sums[2], 4.047347004, 1e-8);
  EXPECT_NEAR(full.sums[3], 17.157831877, 1e-8);
  EXPECT_EQ(full.weights, (std::vector<double>{4, 4, 4, 4}));
  const VectorRun masked = run_vector(all, {1, .5});
  EXPECT_NEAR(masked.sums[0], 3.107685804, 1e-8);
  EXPECT_NEAR(masked.sums[1], 3.336049208, 1e-8);
  EXPECT_NEAR(masked.sums[3], 14.352242481, 1e-8);
  EXPECT_EQ(masked.weights, (std::vector<double>{3, 3, 3, 3}));
  EXPECT_NEAR(run_vector({.micro = 1}, {1, 1}, RouterScore::kSigmoid).sums[0] / 4, 1.003053540,
              1e-8);
  // A coefficient is in the sum and in the weight, so that a log does not show it.
  const VectorRun scaled = run_vector({.micro = .25}, {1, 1});
  EXPECT_NEAR(scaled.sums[0], .25 * 4.047347004, 1e-8);
  EXPECT_EQ(scaled.weights[0], 1);
}

TEST(Balance, GradientsEqualTheVectors) {
  Rows expected = {{-.039696206, .113925207, -.059625583, -.014603418},
                   {0, .125, -.125, 0},
                   {-.001651799, .172151542, -.144661256, -.025838487},
                   {.021765194, .087182303, -.144832236, .035884739}};
  expect_matrix(run_vector({.micro = 1}, {1, 1}).grad, expected);
  for (const size_t row : {1u, 3u})
    for (double& x : expected[row]) x /= 2;
  expect_matrix(run_vector({.micro = 1}, {1, .5}).grad, expected);
  const double row1 = .818147181;
  expect_matrix(run_vector({.z = 1}, {1, 1}).grad.narrow(0, 0, 2),
                {{1.62667206, .986626478, .362959597, .598419208}, {row1, row1, row1, row1}});
  expect_matrix(run_vector({.z = 1}, {1, .5}).grad.narrow(0, 1, 1),
                {{row1 / 2, row1 / 2, row1 / 2, row1 / 2}});
}

// Rounding may change which of two scores is the higher one.
TEST(Balance, ComparesWithTheCountsOfTheRunThatIsReplayed) {
  const ParallelGroups groups;
  RoutingTable table;
  const auto losses_of = [&](double rounding, const RoutingReplay* replay) {
    const BalanceOptions all{.micro = 1, .sequence = 1, .global = 1};
    RouterBalance balance(all, 1, RouterScore::kSoftmax, 2, /*divides_rows=*/false, groups);
    LossPass pass(all);
    pass.context.tokens.of_sequence = vector({1, 1});
    pass.context.place.sample = at::tensor({8, 9}, at::kLong);
    pass.context.routing = replay;
    Rows rows = kLogits;
    rows[1][3] += rounding;  // of four equal ones
    balance.add_losses(matrix(rows), LayerContext{pass.context, {}});
    return pass.totals.clone();
  };
  const RoutingReplay record{.record = &table}, imposed{.imposed = &table};
  const at::Tensor first = losses_of(0, &record);
  EXPECT_GT(distance(losses_of(1e-12, nullptr), first), 1e-2);
  EXPECT_LE(distance(losses_of(1e-12, &imposed), first), 1e-11);
  EXPECT_THROW(table.find_counts(2, at::tensor({8}, at::kLong)), Error);
  EXPECT_THROW(table.find_counts(1, at::tensor({7}, at::kLong)), Error);
}

// One sequence after the other as micro-batches; the second sees the counts of both.
TEST(Balance, GlobalRemembersTheStepAndForgetsIt) {
  for (const double second : {1.0, .5}) {
    const ParallelGroups one;
    const BalanceOptions options{.global = 1};
    RouterBalance balance(options, 1, RouterScore::kSoftmax, 2, false, one);
    const auto sum_of = [&](int64_t sequence, bool discarded) {
      LossPass pass(options);
      pass.context.discarded = discarded;
      pass.context.tokens.of_sequence = vector({sequence == 0 ? 1.0 : second});
      balance.add_losses(matrix(kLogits).view({2, 2, 4}).select(1, sequence).contiguous(),
                         LayerContext{pass.context, {}});
      return pass.totals[0][0].item<double>();
    };
    for (int step = 0; step < 2; ++step) {
      sum_of(1, /*discarded=*/true);
      EXPECT_NEAR(sum_of(0, false) + sum_of(1, false), second == 1.0 ? 4.215371608 : 3.275710408,
                  1e-8);
      balance.step_ended();
    }
  }
  run_ranks(2, [](const std::shared_ptr<Backend>& world) {
    const ParallelGroups groups = make_parallel_groups({}, world);
    const VectorRun run =
        run_vector({.global = 1}, {1}, RouterScore::kSoftmax, groups, groups.dp.rank());
    const at::Tensor sum = at::full({1}, run.sums[0], at::kDouble);
    groups.dp.all_reduce(sum)->wait();
    EXPECT_NEAR(sum.item<double>(), 4.047347004, 1e-8);
  });
}

TEST(Balance, PaddingAndSequencesWithoutTokensWeighNothing) {
  const SequenceTotals totals{vector({3, 0, 5}), vector({4, 0, 8})};
  EXPECT_TRUE(at::equal(weights_of_sequences(totals, true), vector({.75, 0, .625})));
  EXPECT_LE(distance(weights_of_sequences(totals, false), vector({1. / 12, 0, 1. / 12})), 1e-16);
  EXPECT_TRUE(at::equal(weights_of_sequences({vector({0}), vector({0})}, false), vector({0})));
  const BalanceOptions all{.micro = 1, .sequence = 1, .global = 1, .z = 1};
  const ParallelGroups one;
  RouterBalance balance(all, 1, RouterScore::kSoftmax, 2, false, one);
  LossPass pass(all);
  pass.context.tokens.of_sequence = vector({0, 0});
  pass.context.tokens.padding = at::ones({2, 2}, at::kBool);
  const at::Tensor logits = matrix(kLogits).set_requires_grad(true);
  balance.add_losses(logits, LayerContext{pass.context, {}});
  EXPECT_TRUE(at::equal(pass.totals, at::zeros({4, 2}, at::kDouble)));
  pass.tape.backward((logits * 0).sum());
  EXPECT_TRUE(at::equal(logits.grad(), at::zeros_like(logits)));
}

TEST(Balance, NoRows) {
  const BalanceOptions all{.micro = 1, .sequence = 1, .global = 1, .z = 1};
  const ParallelGroups one;
  RouterBalance balance(all, 1, RouterScore::kSoftmax, 2, false, one);
  LossPass pass(all);
  pass.context.tokens.of_sequence = vector({1, 1});
  balance.add_losses(at::empty({0, 4}, at::kDouble), LayerContext{pass.context, {}});
  EXPECT_TRUE(at::equal(pass.totals, at::zeros({4, 2}, at::kDouble)));
}

TEST(Balance, LossesHaveMegatronsNames) {
  EXPECT_TRUE(balance_loss_names({}).empty());
  EXPECT_EQ(balance_loss_names({.micro = 1, .sequence = 1, .global = 1, .z = 1}),
            (std::vector<std::string_view>{"load_balancing_loss", "seq_load_balancing_loss",
                                           "global_load_balancing_loss", "z_loss"}));
}

TEST(Balance, LossesOfLayersAreLoggedAndNotTrainedAgain) {
  BalanceOptions options{.micro = .5, .z = .25};
  options.per_layer = true;
  EXPECT_EQ(layer_loss_names(options, 3),
            (std::vector<std::string>{"moe/load_balancing_loss_layer_2", "moe/z_loss_layer_2"}));
  const ParallelGroups one;
  RouterBalance balance(options, 3, RouterScore::kSoftmax, 2, false, one);
  LossPass pass(options, 3);
  pass.context.tokens.of_sequence = vector({1, 1});
  const at::Tensor logits = matrix(kLogits).set_requires_grad(true);
  balance.add_losses(logits, LayerContext{pass.context, {}});
  expect_matrix(pass.totals, {{.5 * 4.047347004, .5 * 4},
                              {.25 * 17.157831877, .25 * 4},
                              {4.047347004, 4},
                              {17.157831877, 4}});
  pass.tape.backward((logits * 0).sum());
  EXPECT_TRUE(
      at::equal(logits.grad() / kLossScale, run_vector({.micro = .5, .z = .25}, {1, 1}).grad));
}

// --- Partitions ---

constexpr int64_t kTokens = 16, kSequences = 16, kWidth = 6, kPartitionExperts = 5, kChoices = 2;

struct Partition {
  int tensor, context, data;
  int64_t micro_batch;  // sequences
  bool recomputed = false;
  int ranks() const { return tensor * context * data; }
};

struct Kind {
  const char* name;
  BalanceOptions options;
  RouterScore score = RouterScore::kSoftmax;
};

// The samples of a step.
struct StepData {
  at::Tensor x = random_matrix({kTokens, kSequences, kWidth}, 1);
  at::Tensor weight;         // [E, h]
  at::Tensor mask, padding;  // [sequences, tokens]
  StepData() {
    const at::Tensor draw = random_matrix({kSequences, kTokens}, 2);
    padding = draw > 1.2;
    padding[3].fill_(true);  // a sequence without tokens
    mask = (draw > -0.5).logical_and(padding.logical_not()).to(at::kDouble);
    mask[6].fill_(0);  // one of prompts alone
  }
  SequenceTotals totals(int64_t first, int64_t count) const {
    return {mask.narrow(0, first, count).sum(1),
            padding.logical_not().narrow(0, first, count).sum(1).to(at::kDouble)};
  }
};

// The loss of all tokens of a step from whole logits [tokens, sequences, E], by its definition.
at::Tensor plain_loss(const at::Tensor& logits, const StepData& data, const Kind& kind,
                      const Partition& part, bool per_token) {
  at::Tensor p = kind.score == RouterScore::kSoftmax ? logits.softmax(2) : logits.sigmoid();
  p = p / p.sum(2, true);
  const at::Tensor real = data.padding.logical_not().t().to(at::kDouble);  // [s, b]
  const at::Tensor best = std::get<1>(p.detach().topk(kChoices, 2));
  const at::Tensor chosen = at::zeros_like(p).scatter(2, best, 1) * real.unsqueeze(2);
  const at::Tensor squares = logits.logsumexp(2).square();
  const auto share = [&](int64_t first, int64_t count) {  // of sequences [first, first + count)
    const double tokens = real.narrow(1, first, count).sum().item<double>();
    return chosen.narrow(1, first, count).sum(at::IntArrayRef{0, 1}) / std::max(tokens, 1.0);
  };
  const int64_t b = part.micro_batch, together = b * part.data;
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (int64_t q = 0; q < kSequences; ++q) {
    const int64_t first = q / b * b;
    const double tokens = real.select(1, q).sum().item<double>();
    const double micro = real.narrow(1, first, b).sum().item<double>();
    if (tokens == 0) continue;
    const at::Tensor a =
        real.select(1, q) * (per_token ? data.mask[q].sum().item<double>() / tokens : 1 / micro);
    const BalanceOptions& o = kind.options;
    const at::Tensor phi = o.micro * share(first, b) + o.sequence * share(q, 1) +
                           o.global * share(0, (q / together + 1) * together);
    sum = sum +
          (a.unsqueeze(1) * p.select(1, q) * phi).sum() * (double{kPartitionExperts} / kChoices) +
          o.z * (a * squares.select(1, q)).sum();
  }
  return sum;
}

struct StepResult {
  at::Tensor totals;       // over all ranks
  at::Tensor weight_grad;  // of this rank
  at::Tensor x_grad;       // [tokens, sequences, h], 0 for those of other ranks
};

// The passes of this rank.
StepResult run_rank(const StepData& data, const Kind& kind, const Partition& part, bool per_token,
                    const ParallelGroups& groups) {
  RouterOptions options;
  options.hidden_size = kWidth;
  options.num_experts = kPartitionExperts;
  options.routing.topk = kChoices;
  options.routing.score = kind.score;
  options.balance = kind.options;
  options.sequence_parallel = part.tensor > 1;
  Router router(options, 1, groups);
  PlainParameterStore store(router, at::kDouble, at::kCPU, true);
  Parameter& weight = *router.parameters()[0];
  weight.value.copy_(data.weight);
  EXPECT_EQ(weight.placement.partial_grad.contains(Axis::kTensor), part.tensor > 1);
  const at::Tensor positions = zigzag_positions(kTokens, groups.cp.size(), groups.cp.rank());
  const int64_t rows = positions.numel() / part.tensor, first_row = groups.tp.rank() * rows;
  const at::Tensor own = positions.narrow(0, first_row, rows);
  StepResult result{at::Tensor(), at::Tensor(), at::zeros_like(data.x)};
  const int64_t b = part.micro_batch;
  for (int64_t first = groups.dp.rank() * b; first < kSequences; first += b * part.data) {
    LossPass pass(kind.options);
    pass.context.place = {at::arange(first, first + b, at::kLong), positions};
    pass.context.rows = {pass.context.place.sample, own};
    pass.context.first_row = first_row;
    pass.context.tokens = {weights_of_sequences(data.totals(first, b), per_token),
                           data.padding.narrow(0, first, b).index_select(1, positions)};
    const at::Tensor x = data.x.index_select(0, own).narrow(1, first, b).contiguous();
    x.set_requires_grad(true);
    const auto body = [&](const at::Tensor& in) {
      return router.forward(in, LayerContext{pass.context, {}}).weights.sum() * 0;
    };
    const at::Tensor root = part.recomputed ? pass.tape.run(body, x) : body(x);
    pass.tape.backward(root, at::ones({}, at::kDouble));
    result.x_grad.narrow(1, first, b).index_copy_(0, own, x.grad());
    result.totals = result.totals.defined() ? result.totals + pass.totals : pass.totals;
  }
  groups.world.all_reduce(result.totals)->wait();
  result.weight_grad = store.grad(weight);
  return result;
}

void expect_partition_equals_the_formula(const Kind& kind, const Partition& part, bool per_token) {
  StepData data;
  data.weight = random_matrix({kPartitionExperts, kWidth}, 3);
  const at::Tensor x = data.x.clone().set_requires_grad(true);
  const at::Tensor w = data.weight.clone().set_requires_grad(true);
  const at::Tensor loss = plain_loss(at::matmul(x, w.t()), data, kind, part, per_token);
  (loss * kLossScale).backward();
  const BalanceOptions& o = kind.options;
  const double coefficient = o.micro + o.sequence + o.global + o.z;
  // Of the mean of means: the micro-batches that have tokens
  const int64_t passes = data.padding.logical_not()
                             .view({kSequences / part.micro_batch, -1})
                             .any(1)
                             .sum()
                             .item<int64_t>();
  const double weight =
      coefficient * (per_token ? data.mask.sum().item<double>() : static_cast<double>(passes));
  ASSERT_GT(loss.item<double>(), 0.01);
  ASSERT_GT(w.grad().abs().max().item<double>(), 1e-3);
  run_ranks(part.ranks(), [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = part.tensor;
    config.context_parallel_size = part.context;
    config.sequence_parallel = part.tensor > 1;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const StepResult own = run_rank(data, kind, part, per_token, groups);
    EXPECT_NEAR(own.totals[0][0].item<double>(), loss.item<double>(), 1e-11);
    EXPECT_NEAR(own.totals[0][1].item<double>(), weight, 1e-11);
    const at::Tensor weight_grad = own.weight_grad.clone(), x_grad = own.x_grad.clone();
    groups.world.all_reduce(weight_grad)->wait();
    groups.world.all_reduce(x_grad)->wait();
    EXPECT_LE(distance(weight_grad, w.grad()), 1e-12);
    EXPECT_LE(distance(x_grad, x.grad()), 1e-13);
  });
}

constexpr Partition kPartitions[] = {
    {1, 1, 1, 16}, {1, 1, 1, 4},       {1, 1, 1, 1, true}, {2, 1, 1, 4}, {4, 1, 1, 2},
    {1, 2, 1, 4},  {1, 4, 1, 2},       {1, 1, 2, 4},       {1, 1, 4, 2}, {1, 1, 8, 1},
    {2, 2, 1, 4},  {2, 1, 2, 2, true}, {1, 2, 2, 2},       {2, 2, 2, 2}, {2, 2, 2, 4, true},
    {4, 2, 1, 8},  {4, 1, 2, 4},       {1, 4, 2, 1, true}, {2, 4, 1, 2}, {1, 2, 4, 4, true},
    {2, 1, 4, 1}};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"Micro", {.micro = .3}},
      {"Sequence", {.sequence = .3}},
      {"Global", {.global = .3}},
      {"Z", {.z = .01}},
      {"MicroSigmoid", {.micro = .3}, RouterScore::kSigmoid},
      {"SequenceSigmoid", {.sequence = .3}, RouterScore::kSigmoid}};
  return all;
}

class BalanceKinds : public testing::TestWithParam<size_t> {};

TEST_P(BalanceKinds, EqualTheFormulaInEveryPartition) {
  const Kind& kind = kinds()[GetParam()];
  for (const bool per_token : {true, false}) {
    for (const Partition& part : kPartitions) {
      SCOPED_TRACE(cat("t ", part.tensor, " c ", part.context, " d ", part.data, " micro-batch ",
                       part.micro_batch, per_token ? "" : " mean of means"));
      expect_partition_equals_the_formula(kind, part, per_token);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Balance, BalanceKinds, testing::Range(size_t{0}, kinds().size()),
                         [](const auto& info) { return kinds()[info.param].name; });

// Losses of several types are the sum of each alone, and need one sum over ranks.
TEST(Balance, TypesTogetherAreTheirSum) {
  const BalanceOptions all{.micro = .1, .sequence = .2, .global = .3, .z = .01};
  at::Tensor sum;
  for (const BalanceOptions& one : {BalanceOptions{.micro = .1}, BalanceOptions{.sequence = .2},
                                    BalanceOptions{.global = .3}, BalanceOptions{.z = .01}}) {
    const at::Tensor grad = run_vector(one, {1, .5}).grad;
    sum = sum.defined() ? sum + grad : grad;
  }
  EXPECT_LE(distance(run_vector(all, {1, .5}).grad, sum), 1e-14);
}

// The bias moves by the counts of all micro-batches and ranks, each row once.
TEST(ExpertBias, IsTheSameInEveryPartition) {
  StepData data;
  data.weight = random_matrix({kPartitionExperts, kWidth}, 3);
  at::Tensor expected;
  for (const Partition& part : kPartitions) {
    run_ranks(part.ranks(), [&](const std::shared_ptr<Backend>& world) {
      ParallelConfig config;
      config.tensor_model_parallel_size = part.tensor;
      config.context_parallel_size = part.context;
      const ParallelGroups groups = make_parallel_groups(config, world);
      // Without sequence parallelism all tensor ranks have all rows; two routers, one sum
      const bool divided = part.micro_batch != 2;
      RouterOptions options;
      options.hidden_size = kWidth;
      options.num_experts = kPartitionExperts;
      options.routing.score = RouterScore::kSigmoid;
      options.expert_bias = true;
      options.bias_update_rate = 0.03125;
      options.sequence_parallel = divided;
      Router first(options, 1, groups), second(options, 2, groups);
      std::vector<at::Tensor> biases;
      PlainParameterStore stores[] = {{first, at::kDouble, at::kCPU, true},
                                      {second, at::kDouble, at::kCPU, true}};
      first.parameters()[0]->value.copy_(data.weight);
      second.parameters()[0]->value.copy_(-data.weight);
      const at::Tensor positions = zigzag_positions(kTokens, groups.cp.size(), groups.cp.rank());
      const int64_t rows = divided ? positions.numel() / part.tensor : positions.numel();
      const int64_t first_row = divided ? groups.tp.rank() * rows : 0;
      const int64_t b = part.micro_batch;
      for (int step = 0; step < 4; ++step) {
        for (int64_t at = groups.dp.rank() * b; at < kSequences; at += b * part.data) {
          ForwardContext pass;
          pass.training = true;
          pass.place = {at::arange(at, at + b, at::kLong), positions};
          pass.rows = {pass.place.sample, positions.narrow(0, first_row, rows)};
          pass.first_row = first_row;
          pass.tokens.padding = data.padding.narrow(0, at, b).index_select(1, positions);
          const at::Tensor x =
              data.x.index_select(0, pass.rows.position).narrow(1, at, b).contiguous();
          for (Router* router : {&first, &second}) router->forward(x, LayerContext{pass, {}});
        }
        end_step({&first, &second}, at::full({}, step == 1 ? 1 : 0, at::kLong), groups);
      }
      for (Router* router : {&first, &second})
        router->visit_state(
            [&](const std::string&, at::Tensor& state) { biases.push_back(state); });
      if (part.ranks() == 1 && part.micro_batch == 16) expected = at::stack(biases);
      EXPECT_TRUE(at::equal(at::stack(biases), expected))
          << part.tensor << part.context << part.data;
    });
  }
  EXPECT_GT(expected.abs().max().item<double>(), 0.03) << expected;
  EXPECT_FALSE(at::equal(expected[0], expected[1]));
}

}  // namespace
}  // namespace megatron
