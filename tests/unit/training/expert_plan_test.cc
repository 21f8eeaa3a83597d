// What layers of experts hold and send, next to their plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_check.h"
#include "megatron/transformer/moe/moe_cost.h"
#include "tests/unit/training/measured_pass.h"

namespace megatron {
namespace {

const std::string kModel =
    "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 256 --micro-batch-size "
    "2 "
    "--attention-dropout 0 --disable-bias-linear --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 192 ";

#define OFFLOADED \
  "--fine-grained-activation-offloading --min-offloaded-tensor-size 1000 --offload-modules "

// The first `experts` are chosen by as many tokens of each rank, the others by none.
void record_choices(const Arguments& a, int64_t experts, RoutingTable& table) {
  const TransformerConfig& c = a.transformer;
  const int64_t b = a.training.micro_batch_size, n = c.seq_length * b, k = c.moe_router_topk;
  const at::Tensor choices = at::arange(n * k, at::kInt).remainder(experts).view({n, k});
  const TokenPositions rows{at::arange(b, at::kLong), at::arange(c.seq_length, at::kLong)};
  for (int64_t layer = 1; layer <= c.num_layers + c.mtp_num_layers; ++layer)
    table.record(layer, rows, choices, std::max<int64_t>(0, layer - c.num_layers));
}

class ExpertActivations : public testing::TestWithParam<ActivationCase> {};

TEST_P(ExpertActivations, AreWhatThePlanSays) {
  const ActivationCase& c = GetParam();
  RoutingTable choices;
  record_choices(parse(kModel + kRun + c.flags, c.world_size), /*experts=*/4, choices);
  expect_planned(c, kModel, &choices);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, ExpertActivations,
    testing::Values(
        ActivationCase{"serial", ""}, ActivationCase{"gated", "--swiglu --normalization RMSNorm"},
        ActivationCase{"bf16", "--bf16 --swiglu", 1, false, 0.02},
        ActivationCase{"pre_softmax", "--moe-router-pre-softmax"},
        ActivationCase{"losses", "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"},
        ActivationCase{"shared", "--moe-shared-expert-intermediate-size 96"},
        ActivationCase{
            "shared_gate",
            "--swiglu --moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate"},
        ActivationCase{"latents", "--moe-latent-size 64", 1, true, 0.04},
        ActivationCase{"capacity", "--moe-expert-capacity-factor 1.0"},
        ActivationCase{"sigmoid",
                       "--moe-router-score-function sigmoid "
                       "--moe-router-enable-expert-bias"},
        ActivationCase{"recomputed", "--recompute-granularity selective --recompute-modules moe"},
        ActivationCase{"recomputed_act",
                       "--swiglu --recompute-granularity selective --recompute-modules moe_act"},
        ActivationCase{"recomputed_norm",
                       "--recompute-granularity selective --recompute-modules layernorm"},
        ActivationCase{"full", "--recompute-granularity full --recompute-method uniform"},
        ActivationCase{"ep2",
                       "--swiglu --expert-model-parallel-size 2 --moe-token-dispatcher-type "
                       "alltoall",
                       2},
        ActivationCase{"ep2_allgather",
                       "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", 2},
        ActivationCase{"ep2_recomputed",
                       "--expert-model-parallel-size 2 --recompute-granularity selective "
                       "--recompute-modules moe --moe-token-dispatcher-type alltoall",
                       2},
        ActivationCase{"etp2",
                       "--tensor-model-parallel-size 2 --sequence-parallel "
                       "--expert-tensor-parallel-size 2 --moe-token-dispatcher-type alltoall",
                       2},
        ActivationCase{"tp2_ep2",
                       "--tensor-model-parallel-size 2 --sequence-parallel "
                       "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2 "
                       "--moe-shared-expert-intermediate-size 96 --moe-token-dispatcher-type "
                       "alltoall",
                       2},
        ActivationCase{"etp2_ep2",
                       "--tensor-model-parallel-size 2 --sequence-parallel "
                       "--expert-tensor-parallel-size 2 --expert-model-parallel-size 2 "
                       "--moe-token-dispatcher-type alltoall",
                       4},
        ActivationCase{"shared_again",
                       "--swiglu --moe-shared-expert-intermediate-size 96 --recompute-granularity "
                       "selective --recompute-modules shared_experts"},
        ActivationCase{"shared_again_norm",
                       "--swiglu --moe-shared-expert-intermediate-size 96 --moe-shared-expert-gate "
                       "--recompute-granularity selective --recompute-modules shared_experts "
                       "layernorm moe_act"},
        ActivationCase{"overlap",
                       "--swiglu --moe-shared-expert-intermediate-size 96 "
                       "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
                       "--moe-shared-expert-overlap",
                       2},
        ActivationCase{"padded",
                       "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"},
        ActivationCase{"ep2_padded",
                       "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity "
                       "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
                       2},
        ActivationCase{"offloaded", "--swiglu --moe-shared-expert-intermediate-size 96 " OFFLOADED
                                    "mlp_norm expert_fc1 moe_act mlp_act"},
        ActivationCase{"ep2_offloaded",
                       "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
                       "--recompute-granularity selective --recompute-modules moe_act " OFFLOADED
                       "expert_fc1 moe_act",
                       2},
        ActivationCase{"pp2", "--pipeline-model-parallel-size 2 --global-batch-size 8", 2},
        ActivationCase{"every_second", "--moe-layer-freq 2"},
        ActivationCase{"mtp", "--mtp-num-layers 1"},
        ActivationCase{"latent_attention",
                       "--multi-latent-attention --kv-lora-rank 48 --qk-head-dim 24 "
                       "--qk-pos-emb-head-dim 8 --v-head-dim 16 --position-embedding-type rope "
                       "--normalization RMSNorm --swiglu"}),
    [](const auto& info) { return info.param.name; });

// With the choices of every token on the experts of the first rank, its plan at the worst load.
TEST(ExpertActivations, OfABusyRankAreWhatThePlanSaysAtItsLoad) {
  for (const bool bounded : {false, true}) {
    const ActivationCase c{"ep2",
                           bounded ? "--swiglu --expert-model-parallel-size 2 "
                                     "--moe-token-dispatcher-type alltoall "
                                     "--moe-expert-rank-capacity-factor 1.25"
                                   : "--swiglu --expert-model-parallel-size 2 "
                                     "--moe-token-dispatcher-type alltoall",
                           2};
    const Arguments a = parse(kModel + kRun + c.flags, c.world_size);
    RoutingTable choices;
    record_choices(a, /*experts=*/2, choices);
    LayoutPlan plan = make_layout_plan(a, {500, 1024}, /*on_gpu=*/false);
    EXPECT_EQ(worst_expert_load(a.transformer, 2), 2.0);
    plan.set_expert_load(2.0);
    const PassBytes pass = pass_bytes(plan, 0, 0);
    std::mutex mutex;
    run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
      const ParallelGroups groups = make_parallel_groups(a.parallel, world);
      const Measured real = measure(a, 1024, plan.stages.slice(0, 0), groups, &choices);
      if (world->rank() > 0) return;
      const std::lock_guard lock(mutex);
      const auto saved = static_cast<double>(pass.saved.total());
      const auto near = [&](int64_t measured, double planned, double tolerance) {
        EXPECT_NEAR(planned, static_cast<double>(measured), tolerance * planned) << bounded;
      };
      near(real.saved, saved, 0.01);
      near(real.forward, saved + static_cast<double>(pass.forward_extra), 0.05);
      const double backward = saved + static_cast<double>(pass.backward_extra);
      near(real.backward, backward, 0.05);
      // The later round computes again what the first one saved.
      EXPECT_GT(backward, 0.99 * static_cast<double>(real.backward)) << bounded;
    });
  }
}

// -- rows and traffic

const std::string kFourRanks =
    kModel + kRun + "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall ";

LayoutPlan plan_at(const std::string& flags, double load) {
  LayoutPlan plan = make_layout_plan(parse(flags, 4), {500, 1024});
  plan.set_expert_load(load);
  return plan;
}

TEST(ExpertRows, FollowTheLoadAndItsBound) {
  constexpr int64_t kChoices = 2 * 256 * 2;
  const auto rows = [](const std::string& flags, double load) {
    const LayoutPlan plan = plan_at(kFourRanks + flags, load);
    return rank_expert_rows(plan.model(), plan.layer_shape());
  };
  EXPECT_EQ(rows("", 1.0).all, kChoices);
  EXPECT_EQ(rows("", 1.5).all, 3 * kChoices / 2);
  // One expert on each rank: a token has at most one of its two choices there.
  EXPECT_EQ(rows("", 8.0).all, 2 * kChoices) << "e min(k, E/e) / k";
  const RankExpertRows bounded = rows("--moe-expert-rank-capacity-factor 1.25", 2.0);
  EXPECT_EQ(bounded.all, 2 * kChoices);
  EXPECT_EQ(bounded.held, 5 * kChoices / 4);
  EXPECT_EQ(bounded.rounds, 2);
  EXPECT_EQ(rows("--moe-expert-capacity-factor 0.5", 1.0).sent, kChoices / 2);
}

double sent(const LayoutPlan& plan, const std::string& group) {
  for (const GroupTraffic& traffic : stage_traffic(plan, 0))
    if (traffic.group == group) return traffic.total();
  return 0;
}

TEST(ExpertTraffic, FollowsTheFormulas) {
  constexpr double kTokens = 2 * 256, kRow = 128 * 4, kLayers = 2;
  const double microbatches = static_cast<double>(plan_at(kFourRanks, 1).num_microbatches);
  const double rows = kLayers * microbatches * kTokens * 2 * 3 / 4;
  // There and back, forward and backward, and a weight or its gradient each way
  EXPECT_EQ(sent(plan_at(kFourRanks, 1), "ep"), rows * (4 * kRow + 2 * 4));
  // What comes back from a busy rank is more.
  EXPECT_EQ(sent(plan_at(kFourRanks, 2), "ep"), rows * (6 * kRow + 3 * 4));
  EXPECT_EQ(sent(plan_at(kModel + kRun +
                             "--tensor-model-parallel-size 4 --sequence-parallel "
                             "--moe-token-dispatcher-type alltoall ",
                         1),
                 "etp"),
            4 * kLayers * kTokens / 4 * 2 * 3 * (2 * kRow + 4) / 2 *
                static_cast<double>(plan_at(kModel + kRun +
                                                "--tensor-model-parallel-size 4 "
                                                "--sequence-parallel ",
                                            1)
                                        .num_microbatches));
}

TEST(ExpertTraffic, GradientsOfExpertsHaveTheirOwnLine) {
  const LayoutPlan plan = plan_at(
      kModel + kRun + "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall ", 1);
  const double dense = static_cast<double>(plan.buffers(0, 0)[0].layout.num_elements),
               experts = static_cast<double>(plan.buffers(0, 0)[1].layout.num_elements);
  EXPECT_EQ(sent(plan, "dp"), 2 * 4 * dense * 3 / 4);
  EXPECT_EQ(sent(plan, "edp"), 2 * 4 * experts / 2);
}

// -- the report

TEST(ExpertLoads, AreReportedFromBalanceToTheWorstCase) {
  const LayoutPlan plan =
      plan_at(kFourRanks + "--moe-expert-rank-capacity-factor 1.25 ", /*load=*/1.5);
  const LayoutReport report = make_layout_report(plan);
  ASSERT_EQ(report.expert_loads.size(), 4u);
  const char* names[] = {"balance", "--moe-expert-rank-capacity-factor", "--load-factor",
                         "worst case"};
  const double loads[] = {1, 1.25, 1.5, 2};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(report.expert_loads[i].name, names[i]);
    EXPECT_EQ(report.expert_loads[i].load, loads[i]);
  }
  EXPECT_GT(report.expert_loads[1].allocated, report.expert_loads[0].allocated);
  EXPECT_EQ(report.expert_loads[2].allocated, report.stages[0].memory.allocated());
  EXPECT_EQ(report.expert_loads[3].rows.held, report.expert_loads[1].rows.held);
  EXPECT_THAT(layout_text(plan, report), testing::HasSubstr("worst case"));
  EXPECT_THAT(layout_json(plan, report), testing::HasSubstr("\"rows_at_a_time\": 1280"));
  const LayoutPlan whole = make_layout_plan(parse(kModel + kRun, 4), {500, 1024});
  EXPECT_TRUE(make_layout_report(whole).expert_loads.empty());
}

}  // namespace
}  // namespace megatron
