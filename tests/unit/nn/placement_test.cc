// Boxes and random numbers derived from a placement.
#include "megatron/nn/placement.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using Boxes = std::vector<std::pair<Box, std::vector<int64_t>>>;

// A plain value for comparison: {global box, local offset}.
Boxes boxes_of(const std::vector<ShardPiece>& pieces) {
  Boxes boxes;
  for (const ShardPiece& piece : pieces) boxes.emplace_back(piece.global, piece.local_offset);
  return boxes;
}

ParallelGroups tensor_groups(const std::shared_ptr<Backend>& backend) {
  ParallelGroups groups;
  groups.tp = ProcessGroup(backend, "tp");
  return groups;
}

Parameter sharded(std::vector<int64_t> global, int dim, int ranks,
                  std::vector<int64_t> parts = {}) {
  Parameter parameter;
  parameter.global_shape = parameter.local_shape = std::move(global);
  parameter.local_shape[static_cast<size_t>(dim)] /= ranks;
  parameter.placement.shards = {{dim, Axis::kTensor, std::move(parts)}};
  return parameter;
}

TEST(ShardPieces, WholeOnOneRank) {
  const Parameter parameter = sharded({6, 4}, 0, 1, {2, 4});
  EXPECT_EQ(boxes_of(shard_pieces(parameter, {})), (Boxes{{{{0, 0}, {6, 4}}, {0, 0}}}));
}

TEST(ShardPieces, PlainGatedColumnsAndPaddedRows) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = tensor_groups(backend);
    const int64_t r = groups.tp.rank();
    EXPECT_EQ(boxes_of(shard_pieces(sharded({6, 4}, 0, 2), groups)),
              (Boxes{{{{3 * r, 0}, {3, 4}}, {0, 0}}}));
    EXPECT_EQ(boxes_of(shard_pieces(sharded({6, 4}, 1, 2), groups)),
              (Boxes{{{{0, 2 * r}, {6, 2}}, {0, 0}}}));
    // Parts of different size: each rank holds a slice of either.
    EXPECT_EQ(boxes_of(shard_pieces(sharded({12, 4}, 0, 2, {4, 8}), groups)),
              (Boxes{{{{2 * r, 0}, {2, 4}}, {0, 0}}, {{{4 + 4 * r, 0}, {4, 4}}, {2, 0}}}));
    Parameter bias;
    bias.global_shape = bias.local_shape = {5};
    EXPECT_EQ(boxes_of(shard_pieces(bias, groups)), (Boxes{{{{0}, {5}}, {0}}}));
  });
  run_ranks(4, [](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = tensor_groups(backend);
    const int64_t r = groups.tp.rank();
    Parameter table = sharded({16, 3}, 0, 4);
    table.valid_rows = 10;
    const int64_t rows[] = {4, 4, 2, 0};
    const Boxes expected = rows[r] == 0 ? Boxes{} : Boxes{{{{4 * r, 0}, {rows[r], 3}}, {0, 0}}};
    EXPECT_EQ(boxes_of(shard_pieces(table, groups)), expected);
  });
}

TEST(ShardedTensorOf, NamesTheLogicalShapeAndOneWriter) {
  std::mutex mutex;
  int writers_of_split = 0, writers_of_whole = 0;
  run_ranks(4, [&](const std::shared_ptr<Backend>& world) {
    const int rank = world->rank();
    ParallelGroups groups;  // tp 2 x dp 2
    groups.tp = ProcessGroup(world, "world").subgroup({rank / 2 * 2, rank / 2 * 2 + 1}, "tp");
    groups.dp_cp = groups.dp =
        ProcessGroup(world, "world").subgroup({rank % 2, rank % 2 + 2}, "dp");
    Parameter table = sharded({8, 3}, 0, 2);
    table.valid_rows = 7;
    at::Tensor local = at::zeros(table.local_shape, at::kBFloat16);
    const ShardedTensor split = sharded_tensor(table, groups, "table", local);
    EXPECT_EQ(split.key, "table");
    EXPECT_EQ(split.dtype, DType::kBFloat16);
    EXPECT_EQ(split.global_shape, (std::vector<int64_t>{7, 3}));
    EXPECT_EQ(split.local_shape, (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(split.data, local.data_ptr());
    Parameter bias;
    bias.global_shape = bias.local_shape = {4};
    at::Tensor whole = at::zeros({4});
    const std::lock_guard lock(mutex);
    writers_of_split += split.replica_id == 0;
    writers_of_whole += sharded_tensor(bias, groups, "bias", whole).replica_id == 0;
  });
  EXPECT_EQ(writers_of_split, 2);  // the two halves, of one data rank
  EXPECT_EQ(writers_of_whole, 1);
}

// Rank 3 of 4 holds nothing but padding of the vocabulary, and must not be taken for a holder of
// the whole.
TEST(ShardedTensorOf, RanksOfAPaddedVocabularyLoadTheirRows) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / "megatron_nn_padded_vocabulary";
  std::filesystem::remove_all(folder);
  at::Tensor rows = at::arange(30, at::kFloat).view({10, 3}).add(1.0);
  Parameter whole = sharded({10, 3}, 0, 1);
  SaveRequest request;
  request.root = folder;
  request.tensors = {sharded_tensor(whole, {}, "table", rows)};
  const Checkpoint checkpoint(save_checkpoint(request).directory);
  const at::Tensor padded = at::constant_pad_nd(rows, {0, 0, 0, 6});
  run_ranks(4, [&](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = tensor_groups(backend);
    Parameter table = sharded({16, 3}, 0, 4);
    table.valid_rows = 10;
    at::Tensor local = at::full({4, 3}, 77.0f);
    const ShardedTensor wanted[] = {sharded_tensor(table, groups, "table", local)};
    checkpoint.load(wanted);
    EXPECT_TRUE(at::equal(local, padded.narrow(0, 4 * groups.tp.rank(), 4))) << groups.tp.rank();
  });
  std::filesystem::remove_all(folder);
}

TEST(AxisPosition, ReadsTheGroupOfTheAxis) {
  run_ranks(2, [](const std::shared_ptr<Backend>& backend) {
    ParallelGroups groups;
    groups.dp = ProcessGroup(backend, "dp");
    EXPECT_EQ(axis_position(groups, Axis::kData).size, 2);
    EXPECT_EQ(axis_position(groups, Axis::kData).rank, backend->rank());
    EXPECT_EQ(axis_position(groups, Axis::kTensor).size, 1);
  });
}

// Parameters of every kind of placement and law.
class Zoo : public Module {
 public:
  explicit Zoo(int ranks)
      : rows(sharded({16, 6}, 0, ranks)),
        columns(sharded({6, 16}, 1, ranks)),
        gated(sharded({24, 6}, 0, ranks, {8, 16})),
        table(sharded({16, 6}, 0, ranks)),
        bias(sharded({16}, 0, ranks)),
        scale(sharded({16}, 0, ranks)) {
    for (Parameter* parameter : {&rows, &columns, &gated, &table})
      parameter->init = Init::normal(0.5);
    rows.init = Init::uniform(0.25);
    table.valid_rows = 10;
    scale.init = Init::one();
    add("rows", &rows);
    add("columns", &columns);
    add("gated", &gated);
    add("table", &table);
    add("bias", &bias);
    add("scale", &scale);
  }
  Parameter rows, columns, gated, table, bias, scale;
};

// Every parameter, put together from the pieces of all ranks.
std::map<std::string, at::Tensor> initialized(int ranks, at::ScalarType dtype, int64_t seed) {
  std::map<std::string, at::Tensor> whole;
  std::mutex mutex;
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& backend) {
    const ParallelGroups groups = tensor_groups(backend);
    Zoo zoo(ranks);
    PlainParameterStore store(zoo, dtype, at::kCPU, false);
    // What was there does not matter
    for (Parameter* parameter : zoo.parameters()) parameter->value.fill_(77.0);
    initialize_parameters(zoo, seed, groups);
    const std::lock_guard lock(mutex);
    zoo.visit([&](const std::string& name, Parameter& parameter) {
      at::Tensor& out = whole[name];
      if (!out.defined()) out = at::zeros(parameter.global_shape, parameter.value.options());
      at::Tensor seen = at::zeros_like(parameter.value, at::kBool);
      for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
        at::Tensor to = out, from = parameter.value, mark = seen;
        for (size_t d = 0; d < piece.local_offset.size(); ++d) {
          const auto dim = static_cast<int64_t>(d);
          to = to.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
          from = from.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
          mark = mark.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
        }
        to.copy_(from);
        mark.fill_(true);
      }
      EXPECT_EQ(parameter.value.masked_select(seen.logical_not()).abs().sum().item<double>(), 0.0)
          << name << ": padding";
    });
  });
  return whole;
}

TEST(InitializeParameters, DoesNotDependOnTheNumberOfRanks) {
  const auto one = initialized(1, at::kFloat, 7);
  for (const int ranks : {2, 4}) {
    const auto several = initialized(ranks, at::kFloat, 7);
    ASSERT_EQ(one.size(), several.size());
    for (const auto& [name, tensor] : one)
      EXPECT_TRUE(at::equal(tensor, several.at(name))) << name << " over " << ranks;
  }
}

TEST(InitializeParameters, OtherTypesHoldTheSameDrawsRounded) {
  const auto fp32 = initialized(1, at::kFloat, 7), bf16 = initialized(2, at::kBFloat16, 7),
             fp64 = initialized(1, at::kDouble, 7);
  for (const auto& [name, tensor] : fp32) {
    EXPECT_TRUE(at::equal(tensor.to(at::kBFloat16), bf16.at(name))) << name;
    EXPECT_TRUE(at::equal(tensor, fp64.at(name).to(at::kFloat))) << name;
  }
}

TEST(InitializeParameters, FollowsLawsSeedsAndNames) {
  const auto a = initialized(1, at::kFloat, 7), b = initialized(1, at::kFloat, 8);
  EXPECT_FALSE(at::equal(a.at("rows"), b.at("rows")));
  EXPECT_FALSE(at::equal(a.at("gated").narrow(0, 0, 10), a.at("table").narrow(0, 0, 10)))
      << "one stream for two names";
  EXPECT_TRUE(at::equal(a.at("bias"), at::zeros({16})));
  EXPECT_TRUE(at::equal(a.at("scale"), at::ones({16})));
  EXPECT_LE(a.at("rows").abs().max().item<double>(), 0.25);
  EXPECT_GT(a.at("rows").abs().max().item<double>(), 0.2);
  EXPECT_NEAR(a.at("gated").std().item<double>(), 0.5, 0.1);
  EXPECT_EQ(a.at("table").slice(0, 10).abs().sum().item<double>(), 0.0);
  EXPECT_GT(a.at("table").narrow(0, 9, 1).abs().sum().item<double>(), 0.0);
}

TEST(InitializeParameters, NeedsMemory) {
  Zoo zoo(1);
  EXPECT_THROW(initialize_parameters(zoo, 7, {}), InternalError);
}

}  // namespace
}  // namespace megatron
