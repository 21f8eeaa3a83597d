// A GPT model on data and tensor ranks as threads, with gradients, optimizer states and parameters
// sharded: losses and weights equal those of one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

constexpr int64_t kBatch = 4;
constexpr int kSteps = 3;

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> weights;  // whole, without vocabulary padding
};

struct Sharding {
  int tp = 1, dp = 1;
  DistributedDataParallelConfig data;
  bool recompute = false;
};

void train_rank(const ModelConfig& config, const Sharding& sharding,
                const std::shared_ptr<Backend>& world, std::mutex& mutex, Trained& result) {
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = sharding.tp;
  const ParallelGroups groups = make_parallel_groups(parallel, world);
  GPTModel model(config, groups);
  DistributedDataParallel store(model, groups, at::kDouble, at::kCPU, sharding.data);
  store.initialize(7);
  OptimizerConfig options;
  options.lr = 1e-2;
  options.lr_decay_style = LrDecayStyle::kConstant;
  Optimizer optimizer(options, make_schedule(options, {kSteps, std::nullopt, kBatch}), store);
  const int64_t mine = kBatch / groups.dp_cp.size();
  for (int step = 0; step < kSteps; ++step) {
    store.zero_grad(mine);
    at::Tensor totals = at::zeros({2}, at::kDouble);
    for (int64_t i = 0; i < mine; ++i) {
      const int64_t sample = step * kBatch + groups.dp_cp.rank() * mine + i;
      const at::Tensor text =
          at::arange(13, at::kLong).view({1, 13}).mul(5 + sample).remainder(config.vocab_size);
      const at::Tensor tokens = text.slice(1, 0, -1).contiguous(),
                       labels = text.slice(1, 1).contiguous();
      RecomputeTape tape;
      ForwardContext context = context_for(tokens, /*training=*/true, sample);
      if (sharding.recompute) context.tape = &tape;
      const Loss loss = model.loss(tokens, labels, at::ones({1, 12}), context);
      tape.backward(loss.sum);
      totals += at::stack({loss.sum.detach(), loss.weight.to(at::kDouble)});
    }
    store.finish_grad_sync();
    groups.dp_cp.all_reduce(totals)->wait();
    optimizer.step(totals[1], kBatch);
    if (groups.world.rank() == 0) result.losses.push_back((totals[0] / totals[1]).item<double>());
  }
  store.edit_values([&](Parameter& parameter) {
    const std::lock_guard lock(mutex);
    const ShardedTensor shard = sharded_tensor(parameter, groups, parameter.name, parameter.value);
    at::Tensor& whole = result.weights[parameter.name];
    if (!whole.defined()) whole = at::zeros(shard.global_shape, at::kDouble);
    for (const ShardPiece& piece : shard.pieces) {
      at::Tensor from = parameter.value, to = whole;
      for (size_t d = 0; d < piece.local_offset.size(); ++d) {
        const auto dim = static_cast<int64_t>(d);
        from = from.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
        to = to.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
      }
      to.copy_(from);
    }
  });
}

Trained train(const ModelConfig& config, const Sharding& sharding) {
  Trained result;
  std::mutex mutex;
  run_ranks(sharding.tp * sharding.dp, [&](const std::shared_ptr<Backend>& world) {
    train_rank(config, sharding, world, mutex, result);
  });
  return result;
}

void expect_equal(const ModelConfig& config, bool recompute) {
  Sharding sharding;
  sharding.recompute = recompute;
  const Trained one = train(config, sharding);
  for (const int tp : {1, 2}) {
    for (const auto strategy : {ShardingStrategy::kOptim, ShardingStrategy::kOptimGrads,
                                ShardingStrategy::kOptimGradsParams}) {
      SCOPED_TRACE(cat("tp ", tp, " strategy ", static_cast<int>(strategy)));
      sharding.tp = tp;
      sharding.dp = 2;
      sharding.data.use_megatron_fsdp = true;
      sharding.data.data_parallel_sharding_strategy = strategy;
      sharding.data.overlap_grad_reduce = sharding.data.overlap_param_gather = true;
      const Trained many = train(config, sharding);
      ASSERT_EQ(many.losses.size(), one.losses.size());
      for (size_t i = 0; i < one.losses.size(); ++i)
        EXPECT_NEAR(many.losses[i], one.losses[i], 1e-10) << "step " << i;
      ASSERT_EQ(many.weights.size(), one.weights.size());
      for (const auto& [name, weight] : one.weights)
        EXPECT_LE((many.weights.at(name) - weight).abs().max().item<double>(), 1e-8) << name;
    }
  }
}

TEST(GPTDataParallel, GatedWithDropout) {
  ModelConfig config = read_golden("llama").config;
  config.transformer.hidden_dropout = 0.1;
  config.transformer.attention_dropout = 0.1;
  expect_equal(config, /*recompute=*/false);
}

TEST(GPTDataParallel, TiedWithRecomputation) {
  expect_equal(read_golden("gpt2").config, /*recompute=*/true);
}

}  // namespace
}  // namespace megatron
