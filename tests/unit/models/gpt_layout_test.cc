// The same model on tensor-parallel ranks as threads: loss and gradients equal those of one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

using WholeTensors = std::map<std::string, at::Tensor>;

// Loss and whole gradients, put together from every rank's pieces.
WholeTensors run_on_ranks(const ModelConfig& config, int ranks) {
  WholeTensors whole;
  std::mutex mutex;
  run_ranks(ranks, [&](const std::shared_ptr<Backend>& world) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    GPTModel model(config, groups);
    PlainParameterStore store(model, at::kDouble, at::kCPU, /*gradients=*/true);
    initialize_parameters(model, 7, groups);
    const at::Tensor text =
        at::arange(2 * 13, at::kLong).view({2, 13}).mul(5).remainder(config.vocab_size);
    const at::Tensor tokens = text.slice(1, 0, -1).contiguous(),
                     labels = text.slice(1, 1).contiguous();
    const Loss loss =
        model.loss(tokens, labels, at::ones({2, 12}), context_for(tokens, /*training=*/true, 3));
    RecomputeTape().backward(loss.sum);
    const std::lock_guard lock(mutex);
    whole["loss"] = loss.sum.detach();
    model.visit([&](const std::string& name, Parameter& parameter) {
      const ShardedTensor shard = sharded_tensor(parameter, groups, name, store.grad(parameter));
      auto [found, added] = whole.try_emplace(name, at::Tensor());
      if (added) found->second = at::zeros(shard.global_shape, at::kDouble);
      for (const ShardPiece& piece : shard.pieces) {
        at::Tensor from = store.grad(parameter), to = found->second;
        for (size_t d = 0; d < piece.local_offset.size(); ++d) {
          from = from.narrow(d, piece.local_offset[d], piece.global.shape[d]);
          to = to.narrow(d, piece.global.offset[d], piece.global.shape[d]);
        }
        to.copy_(from);
      }
    });
  });
  return whole;
}

void expect_equal(const ModelConfig& config) {
  const WholeTensors one = run_on_ranks(config, 1);
  const WholeTensors two = run_on_ranks(config, 2);
  ASSERT_EQ(one.size(), two.size());
  double all = 0.0;
  for (const auto& [name, tensor] : one) all += tensor.norm().item<double>();
  for (const auto& [name, tensor] : one) expect_close(two.at(name), tensor, 1e-10, all, name);
}

TEST(GPTLayout, TensorParallelGatedWithDropout) {
  ModelConfig config = read_golden("llama").config;
  config.transformer.hidden_dropout = 0.1;
  config.transformer.attention_dropout = 0.1;
  expect_equal(config);
}

TEST(GPTLayout, TensorParallelTied) {
  ModelConfig config = read_golden("gpt2").config;
  config.transformer.z_loss_coeff = 0.02;
  expect_equal(config);
}

}  // namespace
}  // namespace megatron
