// Relative positions: buckets against those of transformers, the bias and the gradient of its table
// on one rank and on tensor ranks.
#include "megatron/transformer/attention/relative_positions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

TransformerConfig four_heads() {
  TransformerConfig config;
  config.num_layers = 1;
  config.hidden_size = 8;
  config.num_attention_heads = 4;
  config.finalize();
  return config;
}

// A table whose rows are their numbers: the bias says the buckets.
std::vector<int64_t> buckets(const RelativeBuckets& kind, int64_t s) {
  const TransformerConfig config = four_heads();
  const ParallelGroups groups;
  RelativePositions positions(config, kind, groups, nullptr);
  PlainParameterStore store(positions, at::kDouble, at::kCPU, /*gradients=*/false);
  positions.table().value.copy_(at::arange(kind.buckets).unsqueeze(1).expand({-1, 4}));
  const at::NoGradGuard no_grad;
  const at::Tensor row = positions.bias(s).select(0, 3).to(at::kLong).contiguous();
  return {row.data_ptr<int64_t>(), row.data_ptr<int64_t>() + row.numel()};
}

TEST(RelativePositions, BucketsAreThoseOfTransformers) {
  std::ifstream file(MEGATRON_SOURCE_DIR "/tests/golden/encoders/buckets.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  const int64_t first = golden["first"], last = golden["last"];
  ASSERT_EQ(first, -last);
  for (const nlohmann::json& c : golden["cases"]) {
    std::vector<int64_t> expected;
    for (size_t i = 0; i < c["starts"].size(); ++i) {
      const int64_t end =
          i + 1 < c["starts"].size() ? c["starts"][i + 1][0].get<int64_t>() : last + 1;
      expected.resize(static_cast<size_t>(end - first), c["starts"][i][1]);
    }
    EXPECT_EQ(buckets({c["buckets"], c["max_distance"], c["bidirectional"]}, last + 1), expected)
        << c["buckets"] << " " << c["max_distance"] << " " << c["bidirectional"];
  }
}

TEST(RelativePositions, NoBucketsForFarDistancesAreRefused) {
  EXPECT_THROW(bucket_starts({.buckets = 2}), Error);
  EXPECT_THROW(bucket_starts({.buckets = 32, .max_distance = 8}), Error);
}

// The bias of a sequence and the gradient of its table, weighted by numbers that all differ.
std::pair<at::Tensor, at::Tensor> bias_and_gradient(const ParallelGroups& groups) {
  const TransformerConfig config = four_heads();
  RelativePositions positions(config, {8, 7, true}, groups, nullptr);
  PlainParameterStore store(positions, at::kDouble, at::kCPU, /*gradients=*/true);
  positions.table().value.copy_(at::arange(32, at::kDouble).view({8, 4}).sin());
  const at::Tensor bias = positions.bias(9);
  const int64_t heads = bias.size(0), first = groups.tp.rank() * heads;
  const at::Tensor weights = at::arange(4 * 17, at::kDouble).cos().view({4, 17});
  (bias * weights.narrow(0, first, heads)).sum().backward();
  return {bias.detach(), store.grad(positions.table()).clone()};
}

TEST(RelativePositions, TensorRanksReadTheColumnsOfTheirHeads) {
  const auto [whole, grad] = bias_and_gradient({});
  // By the formula: each distance adds to the row of its bucket.
  const std::vector<int64_t> of = buckets({8, 7, true}, 9);
  const at::Tensor weights = at::arange(4 * 17, at::kDouble).cos().view({4, 17});
  at::Tensor expected = at::zeros({8, 4}, at::kDouble);
  for (int64_t i = 0; i < 17; ++i)
    expected.select(0, of[static_cast<size_t>(i)]).add_(weights.select(1, i));
  EXPECT_LT((grad - expected).abs().max().item<double>(), 1e-13);
  // All but that of keys behind the query at the distance 0.
  EXPECT_EQ((expected.abs().sum(1) > 0).sum().item<int64_t>(), 7);
  at::Tensor sum = at::zeros({8, 4}, at::kDouble);
  run_ranks(2, [&, whole = whole](const std::shared_ptr<Backend>& world) {
    ParallelGroups groups;
    groups.world = groups.tp = ProcessGroup(world, "tp");
    const auto [bias, partial] = bias_and_gradient(groups);
    EXPECT_TRUE(at::equal(bias, whole.narrow(0, 2 * world->rank(), 2)));
    at::Tensor all = partial.clone();
    groups.tp.all_reduce(all)->wait();
    if (world->rank() == 0) sum.copy_(all);
  });
  EXPECT_LT((sum - expected).abs().max().item<double>(), 1e-13);
}

}  // namespace
}  // namespace megatron
