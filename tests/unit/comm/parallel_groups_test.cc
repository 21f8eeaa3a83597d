#include "megatron/comm/parallel_groups.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/described_backend.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

TEST(ParallelGroups, EveryRankFindsItsPlace) {
  run_ranks(16, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.pipeline_model_parallel_size = 2;
    config.context_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const int rank = world->rank();
    EXPECT_EQ(groups.tp.rank(), rank % 2);
    EXPECT_EQ(groups.cp.rank(), rank / 2 % 2);
    EXPECT_EQ(groups.dp.rank(), rank / 4 % 2);
    EXPECT_EQ(groups.pp.rank(), rank / 8);
    EXPECT_EQ(groups.dp_cp.rank(), rank / 2 % 4);
    EXPECT_EQ(groups.model_parallel.size(), 4);
    EXPECT_EQ(groups.embd.size(), 2);
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

// 8 ranks of two stages: experts are divided over the two tensor ranks and two of the data ranks.
TEST(ParallelGroups, ExpertsHaveAGridOfTheirOwn) {
  run_ranks(8, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.pipeline_model_parallel_size = 2;
    config.expert_model_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const int rank = world->rank();
    const ProcessGroup& ep = groups.group({Axis::kExpert});
    const ProcessGroup& etp = groups.group({Axis::kExpertTensor});
    const ProcessGroup& edp = groups.group({Axis::kExpertData});
    EXPECT_EQ(etp.rank(), rank % 2);
    EXPECT_EQ(ep.rank(), rank / 2 % 2);
    EXPECT_EQ(ep.size(), 2);
    EXPECT_EQ(edp.size(), 1);
    const ProcessGroup& model = groups.group({Axis::kExpertTensor, Axis::kExpert, Axis::kPipeline});
    EXPECT_EQ(model.size(), 8);
    EXPECT_EQ(model.rank(), rank);
    const at::Tensor sum = at::full({1}, double(rank), at::kDouble);
    ep.all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<double>(), 2 * (rank - rank / 2 % 2 * 2) + 2);
    EXPECT_EQ(groups.group({}).size(), 1);
    EXPECT_THROW(groups.group({Axis::kTensor, Axis::kData}), InternalError);
  });
}

// Without expert parallelism their groups are those of other weights, by the same backend.
TEST(ParallelGroups, ExpertsShareGroupsWithTheSameRanks) {
  run_ranks(8, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.context_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(config, world);
    EXPECT_EQ(groups.ep.size(), 1);
    EXPECT_EQ(groups.etp.name(), "tp");
    EXPECT_EQ(groups.edp.name(), "dp_cp");
    EXPECT_EQ(groups.expert_model_parallel.name(), "model_parallel");
    EXPECT_EQ(groups.edp.rank(), groups.dp_cp.rank());
  });
}

TEST(ParallelGroups, StagesThatShareATableHaveAGroup) {
  run_ranks(8, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.pipeline_model_parallel_size = 4;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const int stage = groups.pp.rank();
    if (stage == 0 || stage == 3) {
      EXPECT_EQ(&groups.stages({0, 3}), &groups.embd);
    }
    if (stage == 3) return;
    const ProcessGroup& three = groups.stages({0, 1, 2});
    EXPECT_EQ(&groups.stages({0, 1, 2}), &three);
    EXPECT_EQ(three.rank(), stage);
    const at::Tensor sum = at::full({1}, double(world->rank()), at::kDouble);
    three.all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<double>(), 3 * groups.tp.rank() + 2 + 4);
  });
}

// Dense models have their groups in every order of the axes; experts are refused by name.
TEST(ParallelGroups, ExpertsThatDoNotFitAreRefusedWhenAskedFor) {
  run_ranks(8, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.pipeline_model_parallel_size = 2;
    config.context_parallel_size = 2;
    config.use_tp_pp_dp_mapping = true;
    const ParallelGroups groups = make_parallel_groups(config, world);
    EXPECT_EQ(groups.group({Axis::kTensor, Axis::kPipeline}).size(), 4);
    for (const AxisSet axes : {AxisSet{Axis::kExpertData}, AxisSet{Axis::kExpertTensor}}) {
      try {
        groups.group(axes);
        ADD_FAILURE() << axes_text(axes);
      } catch (const InternalError& error) {
        ADD_FAILURE() << error.what();
      } catch (const Error& error) {
        EXPECT_STREQ(error.what(),
                     "expert-tensor-parallel size 2 x expert-parallel size 1 differs from "
                     "tensor-parallel size 2 x context-parallel size 2, which the rank order "
                     "tensor, pipeline, data requires to be equal");
      }
    }
  });
}

// What planners build over: the ranks and sizes of every group, and nothing that communicates.
TEST(DescribedBackend, HasThePlacesOfRealGroups) {
  ParallelConfig config;
  config.tensor_model_parallel_size = 2;
  config.pipeline_model_parallel_size = 2;
  config.context_parallel_size = 2;
  config.hybrid_context_parallel = true;
  run_ranks(16, [&](const std::shared_ptr<Backend>& world) {
    const ParallelGroups real = make_parallel_groups(config, world);
    const ParallelGroups described =
        make_parallel_groups(config, described_backend(world->rank(), 16));
    for (const auto member :
         {&ParallelGroups::world, &ParallelGroups::tp, &ParallelGroups::pp, &ParallelGroups::dp,
          &ParallelGroups::cp, &ParallelGroups::dp_cp, &ParallelGroups::model_parallel,
          &ParallelGroups::embd, &ParallelGroups::ep, &ParallelGroups::edp}) {
      EXPECT_EQ((described.*member).rank(), (real.*member).rank()) << (real.*member).name();
      EXPECT_EQ((described.*member).size(), (real.*member).size()) << (real.*member).name();
    }
    ASSERT_EQ(described.cp_widths.size(), real.cp_widths.size());
    for (size_t i = 0; i < real.cp_widths.size(); ++i)
      EXPECT_EQ(described.cp_widths[i].rank(), real.cp_widths[i].rank());
  });
}

TEST(DescribedBackend, CollectivesAreErrorsOfOurs) {
  const ProcessGroup group(described_backend(1, 3), "dp");
  const at::Tensor one = at::zeros({1}), three = at::zeros({3});
  EXPECT_THROW(group.all_reduce(one), InternalError);
  EXPECT_THROW(group.all_gather(three, one), InternalError);
  EXPECT_THROW(group.reduce_scatter(one, three), InternalError);
  EXPECT_THROW(group.all_to_all(three, {1, 1, 1}, three, {1, 1, 1}), InternalError);
  EXPECT_THROW(group.broadcast(one, 0), InternalError);
  EXPECT_THROW(group.send(one, 0), InternalError);
  EXPECT_THROW(group.recv(one, 0), InternalError);
  EXPECT_THROW(group.barrier(), InternalError);
  const ProcessGroup pair = group.subgroup({0, 1}, "pair");
  EXPECT_EQ(pair.rank(), 1);
  EXPECT_THROW(described_backend(3, 3), InternalError);
}

// Neighbours along an axis, made once.
TEST(ParallelGroups, BlocksOfAGroup) {
  run_ranks(8, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 4;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const ProcessGroup& pair = groups.block({Axis::kTensor}, 2, "pair");
    const int rank = world->rank();
    EXPECT_EQ(pair.size(), 2);
    EXPECT_EQ(pair.rank(), rank % 2);
    EXPECT_EQ(&groups.block({Axis::kTensor}, 2, "pair"), &pair);
    EXPECT_EQ(groups.block({Axis::kTensor}, 1, "pair").size(), 1);
    const at::Tensor sum = at::full({1}, double(rank), at::kDouble);
    pair.all_reduce(sum)->wait();
    EXPECT_EQ(sum.item<double>(), rank / 2 * 4 + 1);
    EXPECT_THROW(groups.block({Axis::kTensor}, 3, "triple"), InternalError);
  });
}

// 2 tensor ranks x 6 context ranks as 3 neighbours, twice.
TEST(ParallelGroups, ContextRanksInTwoLevels) {
  run_ranks(12, [](const std::shared_ptr<Backend>& world) {
    ParallelConfig config;
    config.tensor_model_parallel_size = 2;
    config.context_parallel_size = 6;
    EXPECT_TRUE(make_parallel_groups(config, world).cp_hierarchy.empty());
    world->barrier();  // groups of one name are made one after the other
    config.hierarchical_context_parallel_sizes = {3, 2};
    const ParallelGroups groups = make_parallel_groups(config, world);
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
    EXPECT_EQ(error_of([&] { make_parallel_groups(config, world); }),
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

TEST(ParallelConfig, SizesArePositive) {
  ParallelConfig config;
  config.tensor_model_parallel_size = 2;
  config.pipeline_model_parallel_size = 4;
  config.context_parallel_size = 2;
  Violations none;
  config.validate(none);
  EXPECT_TRUE(none.empty());

  config.tensor_model_parallel_size = 0;
  config.context_parallel_size = -1;
  config.expert_model_parallel_size = 0;
  Violations all;
  config.validate(all);
  ASSERT_EQ(all.messages().size(), 3u);
  EXPECT_NE(all.messages()[0].find("--tensor-model-parallel-size is 0"), std::string::npos);
  EXPECT_NE(all.messages()[1].find("--context-parallel-size is -1"), std::string::npos);
  EXPECT_NE(all.messages()[2].find("--expert-model-parallel-size is 0"), std::string::npos);
}

}  // namespace
}  // namespace megatron
