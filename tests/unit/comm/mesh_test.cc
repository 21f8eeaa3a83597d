// Places and groups of ranks, against Megatron's own lists and against the formulas of the two
// grids.
#include "megatron/comm/mesh.h"

#include <gtest/gtest.h>

#include <map>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using Groups = std::vector<std::vector<int>>;

// All groups along the axes, by their first ranks.
Groups groups_along(const Mesh& mesh, AxisSet axes) {
  Groups groups;
  for (int rank = 0; rank < mesh.world_size(); ++rank)
    if (mesh.rank_in_group(rank, axes) == 0) groups.push_back(mesh.group(rank, axes));
  return groups;
}

Groups first(Groups groups, size_t count) {
  groups.resize(count);
  return groups;
}

// 16 ranks: tensor 2, context 2, data 2, pipeline 2; experts: tensor 1, experts 4, data 2.
MeshSizes sixteen() {
  MeshSizes sizes{2, 2, 2, 2};
  sizes.expert = 4;
  return sizes;
}

// Made by Megatron's own code.
TEST(Mesh, ListsTheGroupsOfMegatron) {
  const Mesh mesh(sixteen());
  const auto groups = [&](AxisSet axes) { return groups_along(mesh, axes); };
  EXPECT_EQ(groups({Axis::kTensor}),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(groups({Axis::kContext}),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(groups({Axis::kData}),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
  EXPECT_EQ(groups({Axis::kPipeline}),
            (Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  EXPECT_EQ(groups({Axis::kData, Axis::kContext}),
            (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
  EXPECT_EQ(groups({Axis::kTensor, Axis::kContext}),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(groups({Axis::kModel}),
            (Groups{{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}}));
  EXPECT_EQ(groups({Axis::kExpert}),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(first(groups({Axis::kExpertData}), 2), (Groups{{0, 4}, {1, 5}}));
  EXPECT_EQ(mesh.group_size({Axis::kExpertTensor}), 1);
}

TEST(Mesh, PipelineBeforeData) {
  MeshSizes sizes{2, 2, 2, 2};
  sizes.pipeline_before_data = true;
  sizes.expert_tensor = 4;
  const Mesh mesh(sizes);
  EXPECT_EQ(first(groups_along(mesh, {Axis::kData}), 2), (Groups{{0, 8}, {1, 9}}));
  EXPECT_EQ(first(groups_along(mesh, {Axis::kPipeline}), 2), (Groups{{0, 4}, {1, 5}}));
}

// The places of a rank by counting through the loops of a grid, the last loop being the fastest.
struct Counted {
  std::map<Axis, int> place;
};
std::vector<Counted> count_through(const std::vector<std::pair<Axis, int>>& slowest_first) {
  std::vector<Counted> ranks(1);
  for (const auto& [axis, size] : slowest_first) {
    std::vector<Counted> longer;
    for (const Counted& outer : ranks) {
      for (int i = 0; i < size; ++i) {
        longer.push_back(outer);
        longer.back().place[axis] = i;
      }
    }
    ranks = longer;
  }
  return ranks;
}

// Ranks that agree on every other axis, in the order of the world.
std::vector<int> same_elsewhere(const std::vector<Counted>& all, int rank, AxisSet axes) {
  std::vector<int> ranks;
  for (size_t other = 0; other < all.size(); ++other) {
    bool same = true;
    for (const auto& [axis, place] : all[other].place)
      same =
          same && (axes.contains(axis) || place == all[static_cast<size_t>(rank)].place.at(axis));
    if (same) ranks.push_back(static_cast<int>(other));
  }
  return ranks;
}

// Every subset of the axes of a grid, for every rank.
void expect_counted(const Mesh& mesh, const std::vector<std::pair<Axis, int>>& slowest_first) {
  const std::vector<Counted> all = count_through(slowest_first);
  ASSERT_EQ(all.size(), static_cast<size_t>(mesh.world_size()));
  for (uint32_t chosen = 0; chosen < 16; ++chosen) {
    AxisSet axes;
    for (uint32_t i = 0; i < 4; ++i)
      if ((chosen >> i & 1) != 0) axes.insert(slowest_first[i].first);
    for (int rank = 0; rank < mesh.world_size(); ++rank) {
      const std::vector<int> expected = same_elsewhere(all, rank, axes);
      EXPECT_EQ(mesh.group(rank, axes), expected) << axes_text(axes) << " of rank " << rank;
      EXPECT_EQ(mesh.group_size(axes), static_cast<int>(expected.size()));
      EXPECT_EQ(mesh.num_groups(axes) * mesh.group_size(axes), mesh.world_size());
      EXPECT_EQ(expected.at(static_cast<size_t>(mesh.rank_in_group(rank, axes))), rank);
    }
  }
}

TEST(Mesh, GridsAreAsCounted) {
  for (const bool pipeline_before_data : {false, true}) {
    for (const int expert : {1, 2, 3, 6}) {
      MeshSizes s{2, 3, 4, 2};
      s.expert = expert;
      s.expert_tensor = pipeline_before_data ? 6 / expert : 2;
      s.pipeline_before_data = pipeline_before_data;
      const Mesh mesh(s);
      const int etp = static_cast<int>(s.expert_tensor), edp = 24 / (etp * expert);
      if (pipeline_before_data) {
        expect_counted(
            mesh,
            {{Axis::kData, 4}, {Axis::kPipeline, 2}, {Axis::kContext, 3}, {Axis::kTensor, 2}});
        expect_counted(mesh, {{Axis::kExpertData, edp},
                              {Axis::kPipeline, 2},
                              {Axis::kExpert, expert},
                              {Axis::kExpertTensor, etp}});
      } else {
        expect_counted(
            mesh,
            {{Axis::kPipeline, 2}, {Axis::kData, 4}, {Axis::kContext, 3}, {Axis::kTensor, 2}});
        expect_counted(mesh, {{Axis::kPipeline, 2},
                              {Axis::kExpertData, edp},
                              {Axis::kExpert, expert},
                              {Axis::kExpertTensor, etp}});
      }
    }
  }
}

TEST(Mesh, RanksAreSumsOfPlaces) {
  const Mesh mesh(MeshSizes{2, 3, 4, 2});
  const AxisSet data = {Axis::kData, Axis::kContext};
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    EXPECT_EQ(mesh.rank_at({Axis::kTensor}, mesh.rank_in_group(rank, {Axis::kTensor})) +
                  mesh.rank_at(data, mesh.rank_in_group(rank, data)) +
                  mesh.rank_at({Axis::kPipeline}, mesh.rank_in_group(rank, {Axis::kPipeline})),
              rank);
  }
  EXPECT_THROW(mesh.rank_at({Axis::kTensor}, 2), InternalError);
}

TEST(Mesh, NamesPlacesAndAxes) {
  const Mesh mesh(MeshSizes{2, 1, 2, 4});
  EXPECT_EQ(mesh.place_text(13), "tp 1 dp 0 pp 3");
  EXPECT_EQ(Mesh().place_text(0), "");
  EXPECT_EQ(axes_text({Axis::kContext, Axis::kData}), "dp-cp");
  EXPECT_EQ(axes_text({Axis::kModel}), "tp-pp");
  EXPECT_EQ(axes_text({Axis::kPipeline, Axis::kExpert, Axis::kExpertTensor}), "etp-ep-pp");
}

TEST(Mesh, RefusesSizesThatDoNotFit) {
  EXPECT_EQ(error_of([] { Mesh(MeshSizes{2, 1, 0, 1}); }),
            "axis \"dp\" has size 0, expected at least 1");
  MeshSizes odd{2, 1, 4, 1};
  odd.expert = 3;
  EXPECT_EQ(error_of([&] { Mesh{odd}; }),
            "8 ranks per pipeline stage are not divisible by expert-tensor-parallel size 1 x "
            "expert-parallel size 3");
  MeshSizes swapped{2, 1, 4, 2};
  swapped.expert = 4;
  swapped.pipeline_before_data = true;
  EXPECT_EQ(error_of([&] { Mesh{swapped}; }),
            "expert-tensor-parallel size 1 x expert-parallel size 4 differs from tensor-parallel "
            "size 2 x context-parallel size 1, which the rank order tensor, pipeline, data "
            "requires to be equal");
  // A model without experts needs one grid, in whatever order; the other one is refused when it is
  // asked for.
  MeshSizes dense{2, 2, 2, 2};
  dense.pipeline_before_data = true;
  for (const int expert_tensor : {1, 2}) {  // 2: the tensor ranks of the other weights
    dense.expert_tensor = expert_tensor;
    const Mesh mesh(dense);
    const std::string why = cat("expert-tensor-parallel size ", expert_tensor,
                                " x expert-parallel size 1 differs from tensor-parallel size 2 x "
                                "context-parallel size 2, which the rank order tensor, pipeline, "
                                "data requires to be equal");
    EXPECT_EQ(mesh.group(5, {Axis::kPipeline}), (std::vector<int>{1, 5}));
    EXPECT_EQ(mesh.no_experts(), why);
    EXPECT_EQ(error_of([&] { mesh.group_size({Axis::kExpertData}); }), why);
  }
  dense.context = 1;
  EXPECT_EQ(Mesh(dense).no_experts(), "");
  EXPECT_EQ(Mesh(dense).group_size({Axis::kExpertTensor}), 2);
  EXPECT_THROW(Mesh().group_size({Axis::kTensor, Axis::kExpert}), InternalError);
}

TEST(Blocks, AreNeighboursAndEqualPlaces) {
  EXPECT_EQ(block_of(4, 3), (std::vector<int>{3, 4, 5}));
  EXPECT_EQ(across_blocks(4, 3, 9), (std::vector<int>{1, 4, 7}));
  EXPECT_EQ(block_of(2, 1), (std::vector<int>{2}));
}

}  // namespace
}  // namespace megatron
