// What is derived from placements, on every rank of meshes without a backend.
#include "megatron/nn/reduction.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "megatron/base/check.h"
#include "megatron/comm/described_backend.h"

namespace megatron {
namespace {

constexpr int kRanks = 16;

// Tensor 2, context 2, data 2, pipeline 2; for experts tensor 2, experts 2, data 2.
ParallelConfig config() {
  ParallelConfig sizes;
  sizes.tensor_model_parallel_size = 2;
  sizes.context_parallel_size = 2;
  sizes.pipeline_model_parallel_size = 2;
  sizes.expert_model_parallel_size = 2;
  return sizes;
}

ParallelGroups groups_of(int rank) {
  return make_parallel_groups(config(), described_backend(rank, kRanks));
}

Parameter placed(std::vector<Shard> shards, AxisSet partial, bool expert) {
  Parameter parameter;
  parameter.placement.shards = std::move(shards);
  parameter.placement.partial_grad = partial;
  parameter.placement.expert = expert;
  return parameter;
}

const Parameter kLinear = placed({{0, Axis::kTensor, {}}}, {}, false);
const Parameter kNorm = placed({}, {Axis::kTensor}, false);
const Parameter kOutput = placed({{0, Axis::kModel, {}}}, {}, false);
const Parameter kExpertLinear = placed({{1, Axis::kExpertTensor, {}}}, {}, true);
const Parameter kExpertBias = placed({}, {Axis::kExpertTensor}, true);

TEST(Reductions, GradientsAreSummedOverRanksWithOtherTokens) {
  const Mesh mesh = make_mesh(config(), kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    const ParallelGroups groups = groups_of(rank);
    for (const Parameter* parameter : {&kLinear, &kNorm, &kOutput}) {
      const ProcessGroup& group = gradient_group(parameter->placement, groups);
      EXPECT_EQ(group.size(), 4);
      EXPECT_EQ(group.rank(), mesh.rank_in_group(rank, {Axis::kData, Axis::kContext}));
    }
    for (const Parameter* parameter : {&kExpertLinear, &kExpertBias}) {
      const ProcessGroup& group = gradient_group(parameter->placement, groups);
      EXPECT_EQ(group.size(), 2);
      EXPECT_EQ(group.rank(), mesh.rank_in_group(rank, {Axis::kExpertData}));
    }
  }
}

TEST(Reductions, PartialSumsAreOverTheAxesThatArePartialAndOverStages) {
  const ParallelGroups groups = groups_of(9);
  const auto none = std::vector<const ProcessGroup*>{};
  EXPECT_EQ(partial_groups(kLinear, groups), none);
  EXPECT_EQ(partial_groups(kNorm, groups), std::vector{&groups.tp});
  EXPECT_EQ(partial_groups(kExpertBias, groups), std::vector{&groups.etp});
  Parameter table = kLinear;
  table.shared = &groups.embd;
  EXPECT_EQ(partial_groups(table, groups), std::vector{&groups.embd});
  EXPECT_EQ(partial_groups(kNorm, ParallelGroups{}), none);
}

TEST(Reductions, ScalesAreJoinedOverEveryRankThatUsesTheWeight) {
  const ParallelGroups groups = groups_of(9);
  EXPECT_EQ(use_groups(kLinear.placement, groups), (std::vector{&groups.dp_cp, &groups.tp}));
  EXPECT_EQ(use_groups(kOutput.placement, groups),
            (std::vector{&groups.dp_cp, &groups.model_parallel}));
  EXPECT_EQ(use_groups(kExpertLinear.placement, groups), (std::vector{&groups.edp, &groups.etp}));
}

// Which elements a rank holds: its stage (a layer exists on one; a divided output layer is one
// tensor of both), its expert rank, and its part.
std::string elements_of(const Parameter& parameter, const ParallelGroups& groups) {
  const Placement& placement = parameter.placement;
  const int part = replica_index(shard_groups(placement, groups)).index;
  const bool over_stages = !placement.shards.empty() && placement.shards[0].axis == Axis::kModel;
  return cat(over_stages || parameter.shared != nullptr ? 0 : groups.pp.rank(), "/",
             placement.expert ? groups.ep.rank() : 0, "/", part);
}

TEST(Reductions, EveryElementIsStoredByOneRankAndHasDistinctReplicas) {
  for (const Parameter* parameter : {&kLinear, &kNorm, &kOutput, &kExpertLinear, &kExpertBias}) {
    std::map<std::string, std::multiset<int>> replicas;
    for (int rank = 0; rank < kRanks; ++rank) {
      const ParallelGroups groups = groups_of(rank);
      const ProcessGroup& data = gradient_group(parameter->placement, groups);
      replicas[elements_of(*parameter, groups)].insert(replica_id(*parameter, groups, data));
    }
    for (const auto& [elements, ids] : replicas) {
      EXPECT_EQ(ids.size(), kRanks / replicas.size()) << elements;
      int expected = 0;
      for (const int id : ids) EXPECT_EQ(id, expected++) << elements;
    }
  }
}

TEST(Reductions, SharedParametersHaveOneFirstCopy) {
  std::multiset<int> replicas;
  int counted = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    const ParallelGroups groups = groups_of(rank);
    Parameter table = kNorm;  // whole on tensor ranks, too
    table.shared = &groups.embd;
    const ProcessGroup& data = gradient_group(table.placement, groups);
    replicas.insert(replica_id(table, groups, data));
    counted += counts_in_norm(table, groups) && data.rank() == 0;
    EXPECT_EQ(copy_index(table, groups).count, 4);
  }
  int expected = 0;
  for (const int id : replicas) EXPECT_EQ(id, expected++);
  EXPECT_EQ(counted, 1);
}

// Over the shards of one copy and norm_group, each element counts once.
TEST(Reductions, NormsCountEachElementOnce) {
  const Mesh mesh = make_mesh(config(), kRanks);
  for (const Parameter* parameter : {&kLinear, &kNorm, &kOutput, &kExpertLinear, &kExpertBias}) {
    const Placement& placement = parameter->placement;
    for (int first = 0; first < kRanks; ++first) {
      const std::vector<int> ranks = mesh.group(first, model_axes(placement));
      EXPECT_EQ(norm_group(placement, groups_of(first)).size(), static_cast<int>(ranks.size()));
      std::map<std::string, int> counted;
      for (const int rank : ranks) {
        const ParallelGroups groups = groups_of(rank);
        counted[elements_of(*parameter, groups)] += counts_in_norm(*parameter, groups);
      }
      for (const auto& [elements, times] : counted) EXPECT_EQ(times, 1) << elements;
    }
  }
}

}  // namespace
}  // namespace megatron
