#include "megatron/comm/parallel_groups.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

using Groups = std::vector<std::vector<int>>;

Groups first(Groups groups, size_t count) {
  groups.resize(count);
  return groups;
}

// 16 ranks: tensor 2, context 2, data 2, pipeline 2 (made by Megatron's own code).
TEST(RankGroups, DenseGrid) {
  const std::string order = "tp-cp-ep-dp-pp";
  const std::vector<int> sizes = {2, 2, 1, 2, 2};
  const auto groups = [&](const std::string& mask) { return rank_groups(order, sizes, mask); };
  EXPECT_EQ(groups("tp"),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(groups("cp"),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(groups("dp"),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
  EXPECT_EQ(groups("pp"),
            (Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  EXPECT_EQ(groups("dp-cp"),
            (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
  EXPECT_EQ(groups("tp-cp"),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(groups("tp-cp"), groups("cp-tp")) << "the order of the mask does not matter";
}

TEST(RankGroups, ExpertGrid) {
  const std::string order = "tp-cp-ep-dp-pp";
  const std::vector<int> sizes = {1, 1, 4, 2, 2};
  EXPECT_EQ(rank_groups(order, sizes, "ep"),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(first(rank_groups(order, sizes, "dp"), 2), (Groups{{0, 4}, {1, 5}}));
  EXPECT_EQ(rank_groups(order, sizes, "pp"), rank_groups(order, {2, 2, 1, 2, 2}, "pp"));
}

TEST(RankGroups, PipelineBeforeData) {
  const std::vector<int> sizes = {2, 2, 1, 2, 2};
  EXPECT_EQ(first(rank_groups("tp-cp-ep-pp-dp", sizes, "dp"), 2), (Groups{{0, 8}, {1, 9}}));
  EXPECT_EQ(first(rank_groups("tp-cp-ep-pp-dp", sizes, "pp"), 2), (Groups{{0, 4}, {1, 5}}));
}

TEST(RankGroups, EveryRankIsInOneGroup) {
  for (const char* mask : {"tp", "cp-dp", "tp-pp", "tp-cp-ep-dp-pp"}) {
    std::vector<int> seen(48, 0);
    for (const auto& group : rank_groups("tp-cp-ep-dp-pp", {2, 3, 2, 2, 2}, mask)) {
      for (int rank : group) ++seen.at(rank);
    }
    EXPECT_EQ(seen, std::vector<int>(48, 1)) << mask;
  }
}

template <class Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ParallelGroups, EveryRankFindsItsPlace) {
  run_ranks(16, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.pipeline_model_parallel_size = 2;
    config.context_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(config, world, /*num_query_groups=*/1);
    const int rank = world->rank();
    EXPECT_EQ(groups.tp.rank(), rank % 2);
    EXPECT_EQ(groups.cp.rank(), rank / 2 % 2);
    EXPECT_EQ(groups.dp.rank(), rank / 4 % 2);
    EXPECT_EQ(groups.pp.rank(), rank / 8);
    EXPECT_EQ(groups.dp_cp.rank(), rank / 2 % 4);
    EXPECT_EQ(groups.model_parallel.size(), 4);
    EXPECT_EQ(groups.embd.size(), 2);
    EXPECT_EQ(groups.kv.size(), 2);
    const at::Tensor sum = at::full({1}, double(rank), at::kDouble);
    groups.pp.all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<double>(), 2 * (rank % 8) + 8);
  });
  ParallelConfig config;
  config.tensor_model_parallel_size = 2;
  config.pipeline_model_parallel_size = 4;
  EXPECT_EQ(place_in_mesh(config, 13, 16), "tp 1 dp 0 pp 3");
  config.pipeline_model_parallel_size = 1;
  config.tensor_model_parallel_size = 3;
  EXPECT_EQ(error_of([&] { data_parallel_size(config, 8); }),
            "8 ranks are not divisible by --tensor-model-parallel-size 3 x "
            "--pipeline-model-parallel-size 1 x "
            "--context-parallel-size 1 = 3\nhint: start a multiple of 3 ranks");
}

// 2 tensor ranks x 6 context ranks as 3 neighbours, twice.
TEST(ParallelGroups, ContextRanksInTwoLevels) {
  run_ranks(12, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.context_parallel_size = 6;
    EXPECT_TRUE(make_parallel_groups(config, world, 1).cp_hierarchy.empty());
    world->barrier();  // groups of one name are made one after the other
    config.hierarchical_context_parallel_sizes = {3, 2};
    const ParallelGroups groups = make_parallel_groups(config, world, 1);
    ASSERT_EQ(groups.cp_hierarchy.size(), 2u);
    const ProcessGroup &inner = groups.cp_hierarchy[0], &outer = groups.cp_hierarchy[1];
    EXPECT_EQ(inner.size(), 3);
    EXPECT_EQ(outer.size(), 2);
    EXPECT_EQ(inner.rank(), groups.cp.rank() % 3);
    EXPECT_EQ(outer.rank(), groups.cp.rank() / 3);
    const at::Tensor sum = at::full({1}, double(groups.cp.rank()), at::kDouble);
    inner.all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<double>(), outer.rank() == 0 ? 3 : 12);
    world->barrier();
    config.hierarchical_context_parallel_sizes = {2, 2};
    EXPECT_EQ(error_of([&] { make_parallel_groups(config, world, 1); }),
              "--hierarchical-context-parallel-sizes do not make up 6 context-parallel ranks");
  });
}

TEST(ParallelConfig, LevelsMustMakeUpTheContextRanks) {
  ParallelConfig config;
  config.context_parallel_size = 6;
  for (const std::vector<int64_t>& levels :
       {std::vector<int64_t>{2, 2}, {6}, {-2, -3}, {1, 2, 3}}) {
    config.hierarchical_context_parallel_sizes = levels;
    Violations violations;
    config.validate(violations);
    EXPECT_NE(
        violations.messages().back().find("do not make up --context-parallel-size 6\n"
                                          "hint: two sizes with that product, the inner one first"),
        std::string::npos)
        << violations.messages().back();
  }
  config.hierarchical_context_parallel_sizes = {3, 2};
  Violations violations;
  config.validate(violations);
  for (const std::string& message : violations.messages())
    EXPECT_EQ(message.find("hierarchical"), std::string::npos);
}

TEST(RankGroups, ErrorsNameTheAxis) {
  EXPECT_EQ(error_of([] { rank_groups("tp-dp", {2, 2}, "pp"); }),
            "axis \"pp\" is not in the rank order \"tp-dp\"");
  EXPECT_EQ(error_of([] { rank_groups("tp-dp", {2}, "tp"); }),
            "rank order \"tp-dp\" has 2 axes, but 1 sizes are given");
  EXPECT_EQ(error_of([] { rank_groups("tp-dp", {2, 0}, "tp"); }),
            "axis \"dp\" has size 0, expected at least 1");
}

TEST(ParallelConfig, SizesArePositiveAndExpertsAreNotBuilt) {
  ParallelConfig config;
  config.tensor_model_parallel_size = 2;
  config.pipeline_model_parallel_size = 4;
  config.context_parallel_size = 2;
  Violations none;
  config.validate(none);
  EXPECT_TRUE(none.empty());

  config.tensor_model_parallel_size = 0;
  config.context_parallel_size = -1;
  config.expert_model_parallel_size = 2;
  Violations all;
  config.validate(all);
  ASSERT_EQ(all.messages().size(), 3u);
  EXPECT_NE(all.messages()[0].find("--tensor-model-parallel-size is 0"), std::string::npos);
  EXPECT_NE(all.messages()[1].find("--context-parallel-size is -1"), std::string::npos);
  EXPECT_NE(all.messages()[2].find("--expert-model-parallel-size 2 needs experts"),
            std::string::npos);
}

}  // namespace
}  // namespace megatron
