// --optimizer orthogonal: its update against singular value decompositions, and every layout
// against one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/distributed/sharded_layout.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/planning/layout_plan.h"
#include "megatron/training/setup.h"
#include "tests/extension/proofs.h"
#include "tests/parallel/against_one_rank.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

constexpr const char* kRun =
    "--optimizer orthogonal --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 101 --make-vocab-size-divisible-by 8 --num-workers 0 --micro-batch-size 2 "
    "--global-batch-size 8 --eval-iters 0 --device cpu ";
constexpr const char* kSmall =
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 24 "
    "--max-position-embeddings 24 --init-method-std 0.2 --adam-eps 1e-3 ";
constexpr const char* kMeasured =
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 256 "
    "--attention-dropout 0 ";

OptimizerConfig config() {
  OptimizerConfig config;
  config.optimizer = "orthogonal";
  config.lr = 1e-2;
  config.lr_decay_style = LrDecayStyle::kConstant;
  config.weight_decay = 0.1;
  config.clip_grad = 0.0;
  return config;
}

DistributedDataParallelConfig whole_matrices() {
  DistributedDataParallelConfig config;
  config.whole_matrices = true;
  return config;
}

// Of the matrix by its singular vectors: the iteration leaves each singular value near 1. Of the
// bias by AdamW, whose first step is the learning rate.
TEST(Orthogonal, MatricesMoveAlikeInEveryDirection) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{6, 10}, {12, 3}}) {
    const ParallelGroups groups;
    TestModel model;
    model.declare("linear.weight", shape);
    model.declare("linear.bias", {shape[0]}, ParameterRole::kBias);
    DistributedDataParallel store(model, groups, at::kDouble, at::kCPU, whole_matrices());
    start_values(model);
    Optimizer optimizer(config(), make_schedule(config(), {100, std::nullopt, 4}), store);
    const at::Tensor weight = model[0].value.clone(), bias = model[1].value.clone();
    at::manual_seed(3);
    for (const size_t k : {0, 1}) store.grad(model[k]).copy_(at::randn(model[k].local_shape));
    const at::Tensor grad = store.grad(model[0]).clone(), bias_grad = store.grad(model[1]).clone();
    optimizer.step(1.0, 4);
    const double scale = std::sqrt(std::max(1.0, double(shape[0]) / double(shape[1])));
    const at::Tensor moved = (weight * (1 - 1e-2 * 0.1) - model[0].value) / (1e-2 * scale);
    const auto [u, s, v] = at::linalg_svd(grad, /*full_matrices=*/false);
    const at::Tensor along = u.t().mm(moved).mm(v.t());  // diagonal: the same singular vectors
    const at::Tensor values = along.diagonal();
    EXPECT_LT((along - values.diag()).abs().max().item<double>(), 1e-12);
    EXPECT_GT(values.min().item<double>(), 0.6);
    EXPECT_LT(values.max().item<double>(), 1.3);
    EXPECT_TRUE(at::allclose(bias - model[1].value, 1e-2 * bias_grad.sign(), 1e-5, 1e-8));
  }
}

TEST(Orthogonal, ANonFiniteStepChangesNothing) {
  const ParallelGroups groups;
  TestModel model;
  model.declare("linear.weight", {6, 10});
  DistributedDataParallel store(model, groups, at::kDouble, at::kCPU, whole_matrices());
  start_values(model);
  Optimizer optimizer(config(), make_schedule(config(), {100, std::nullopt, 4}), store);
  const at::Tensor weight = model[0].value.clone();
  set_gradients(model, store, 0, 0.1, 1.0);
  store.grad(model[0])[2][3] = std::nan("");
  optimizer.step(1.0, 4);
  EXPECT_TRUE(at::equal(model[0].value, weight));
  for (const StateTensor& state : optimizer.tensors())
    EXPECT_EQ(state.data.count_nonzero().item<int64_t>(), 0) << state.description.key;
}

class OrthogonalLayouts : public testing::TestWithParam<ProvedLayout> {};

TEST_P(OrthogonalLayouts, TrainWhatOneRankTrains) {
  EXPECT_EQ(differences_in_fp64(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

TEST_P(OrthogonalLayouts, AreProved) {
  EXPECT_EQ(unproved(cat(kRun, kSmall, GetParam().flags), GetParam().ranks), "");
}

// Bytes of the state that a matrix has not, on the rank's shard beyond those on the shard with the
// fewest matrices, which is the one that the plan is of.
int64_t less_than_planned(const LayoutPlan& plan, int rank) {
  const ParallelGroups groups = planned_groups(plan, rank);
  int64_t elements = 0;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    for (const PlannedBuffer& buffer : plan.buffers(groups.pp.rank(), chunk)) {
      const int64_t shards = buffer.sharding.shards;
      std::vector<int64_t> held(static_cast<size_t>(shards));
      for (size_t i = 0; i < buffer.parameters.size(); ++i) {
        if (!is_hidden_matrix(*buffer.parameters[i])) continue;
        const BufferSlot& slot = buffer.layout.slots[i];
        const BufferBucket& bucket = buffer.layout.buckets[static_cast<size_t>(slot.bucket)];
        const int64_t part = (bucket.end - bucket.begin) / shards;
        held[static_cast<size_t>((slot.begin - bucket.begin) / part)] += slot.end - slot.begin;
      }
      elements += held[static_cast<size_t>(groups.dp_cp.rank() % shards)] -
                  *std::min_element(held.begin(), held.end());
    }
  }
  return elements * 4;
}

TEST_P(OrthogonalLayouts, NeedTheMemoryOfThePlan) {
  const std::string flags = cat(kRun, kMeasured, GetParam().flags);
  const Arguments arguments = parse_run(flags, GetParam().ranks);
  const LayoutPlan plan = make_layout_plan(
      arguments, vocabulary_of(arguments, *make_tokenizer(arguments.tokenizer)), /*on_gpu=*/false);
  int index = 0;
  for (const RankMemory& rank : memory_of_ranks(flags, GetParam().ranks)) {
    const int64_t planned = rank.planned - less_than_planned(plan, index++);
    EXPECT_NEAR(double(planned) / double(rank.metered), 1.0, 0.01)
        << planned << " and " << rank.metered;
  }
}

INSTANTIATE_TEST_SUITE_P(Proofs, OrthogonalLayouts, testing::ValuesIn(proved_layouts()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
