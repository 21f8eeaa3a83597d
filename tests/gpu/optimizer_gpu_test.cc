// The optimizer on a GPU against the CPU, with fp32 and with narrow states.
#include <gtest/gtest.h>

#include <cstring>

#include "megatron/base/check.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/optimizer_ops.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/optimizer/test_model.h"

namespace megatron {
namespace {

// Weights and states after five steps, on the CPU.
std::vector<at::Tensor> train(const OptimizerConfig& config, at::ScalarType dtype,
                              at::Device device) {
  const ParallelGroups groups;
  TestModel model;
  model.declare("embedding.weight", {301, 64}, ParameterRole::kEmbedding);
  model.declare("linear.weight", {129, 97}).lr_factor = 3.0;
  model.declare("linear.bias", {129}, ParameterRole::kBias);
  DistributedDataParallel store(model, groups, dtype, device);
  for (size_t k = 0; k < model.size(); ++k) model[k].init = Init::normal(0.5);
  store.initialize(3);
  Optimizer optimizer(config, make_schedule(config, {100, std::nullopt, 4}), store);
  for (int step = 0; step < 5; ++step) {
    store.zero_grad();
    for (size_t k = 0; k < model.size(); ++k) {
      const at::Tensor i = at::arange(model[k].value.numel(), at::kDouble);
      store.grad(model[k]).copy_(
          at::sin(i * 0.7 + (1.3 * step + static_cast<double>(k))).view(model[k].local_shape));
    }
    store.finish_grad_sync();
    optimizer.step(1.0, 4);
  }
  std::vector<at::Tensor> all = {store.flat_values().cpu()};
  for (const StateTensor& entry : optimizer.tensors()) all.push_back(entry.data.cpu());
  return all;
}

TEST(OptimizerGpu, EqualsTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  OptimizerConfig config;
  config.lr = 1e-2;
  config.lr_decay_style = LrDecayStyle::kConstant;
  config.bf16 = true;
  for (const bool narrow : {false, true}) {
    const StateType type = narrow ? StateType::kBf16 : StateType::kFp32;
    config.use_precision_aware_optimizer = narrow;
    config.main_params_dtype = config.exp_avg_dtype = config.exp_avg_sq_dtype = type;
    const auto cpu = train(config, at::kBFloat16, at::kCPU);
    const auto gpu = train(config, at::kBFloat16, at::Device(at::kCUDA, 0));
    const auto again = train(config, at::kBFloat16, at::Device(at::kCUDA, 0));
    ASSERT_EQ(cpu.size(), gpu.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      EXPECT_TRUE(at::equal(gpu[i], again[i])) << "two runs give the same bits";
      EXPECT_EQ(cpu[i].scalar_type(), gpu[i].scalar_type());
      // The draws are the same; a sum that differs in its last bit may still fall on the other
      // side.
      const double differ = gpu[i].ne(cpu[i]).to(at::kDouble).mean().item<double>();
      if (cpu[i].scalar_type() == at::kBFloat16) {
        EXPECT_LT(differ, 1e-3) << "tensor " << i;
      }
      EXPECT_TRUE(
          at::allclose(gpu[i].to(at::kFloat), cpu[i].to(at::kFloat), narrow ? 1.6e-2 : 1e-5, 1e-6))
          << "tensor " << i;
    }
  }
}

// Alone and four at a time: ranks have the same element at different places of their buffers.
TEST(OptimizerGpu, AnElementIsUpdatedAlikeWhereverItLies) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kSize = 1000;
  const at::TensorOptions floats = at::dtype(at::kFloat).device(at::kCUDA);
  StepState record;
  record.adam_steps = 3;
  record.grad_factor = 0.7;
  record.lr[0] = 0.1;
  record.weight_decay = 0.01;
  at::Tensor state = at::empty({static_cast<int64_t>(sizeof record)}, at::kByte);
  std::memcpy(state.data_ptr(), &record, sizeof record);
  state = state.to(at::kCUDA);
  const auto updated = [&](int64_t begin) {
    FlatUpdate flat;
    const auto placed = [&](double by) {
      at::Tensor all = at::zeros({begin + kSize}, floats);
      all.slice(0, begin).copy_(at::sin(at::arange(kSize, floats) * by));
      return all;
    };
    flat.grad = placed(0.7);
    flat.master = placed(1.3);
    flat.states = {placed(0.3), placed(0.9).abs()};
    UpdateBlock block;
    block.begin = begin;
    block.count = kSize;
    block.weight_decay_mult = 1.0f;
    upload_blocks(flat, {block});
    adamw_update(flat, state, {0.9, 0.95, 1e-8});
    return at::stack({flat.master, flat.states[0], flat.states[1]}).slice(1, begin);
  };
  const at::Tensor in_quads = updated(4);
  for (const int64_t begin : {0, 1, 3})
    EXPECT_TRUE(at::equal(updated(begin), in_quads)) << "at element " << begin;
}

// States in host memory: gradients come down and values go up on streams of their own, under the
// update of other pieces.
TEST(OptimizerGpu, StatesInHostMemoryTrainAsOnTheCpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    OptimizerConfig config;
    config.lr = 1e-2;
    config.lr_decay_style = LrDecayStyle::kConstant;
    config.bf16 = dtype == at::kBFloat16;
    const auto gpu = train(config, dtype, at::Device(at::kCUDA, 0)),
               cpu = train(config, dtype, at::kCPU);
    for (const double fraction : {1.0, 0.3}) {
      config.optimizer_cpu_offload = true;
      config.optimizer_offload_fraction = fraction;
      const auto offloaded = train(config, dtype, at::Device(at::kCUDA, 0));
      const auto again = train(config, dtype, at::Device(at::kCUDA, 0));
      config.optimizer_cpu_offload = false;
      ASSERT_EQ(offloaded.size(), gpu.size());
      for (size_t i = 0; i < gpu.size(); ++i) {
        EXPECT_TRUE(at::equal(offloaded[i], again[i])) << "two runs give the same bits";
        EXPECT_EQ(offloaded[i].scalar_type(), gpu[i].scalar_type());
        for (const at::Tensor& other : {gpu[i], cpu[i]}) {
          const double differ = offloaded[i].ne(other).to(at::kDouble).mean().item<double>();
          if (other.scalar_type() == at::kBFloat16) {
            EXPECT_LT(differ, 1e-3) << "tensor " << i;
          }
          EXPECT_TRUE(at::allclose(offloaded[i].to(at::kFloat), other.to(at::kFloat), 1e-5, 1e-6) ||
                      other.scalar_type() == at::kBFloat16)
              << "tensor " << i;
        }
      }
    }
  }
}

// More pieces than buffers, so that each buffer is used again while others are on their way.
TEST(OptimizerGpu, ManyPiecesInHostMemory) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  std::vector<at::Tensor> values;
  for (const bool offload : {false, true}) {
    OptimizerConfig config;
    config.lr = 1e-2;
    config.lr_decay_style = LrDecayStyle::kConstant;
    config.optimizer_cpu_offload = offload;
    const ParallelGroups groups;
    TestModel model;
    for (int k = 0; k < 3; ++k)
      model.declare(cat("linear", k, ".weight"), {7000, 7000});  // 147 million elements: 9 pieces
    DistributedDataParallel store(model, groups, at::kFloat, at::Device(at::kCUDA, 0));
    Optimizer optimizer(config, make_schedule(config, {100, std::nullopt, 4}), store);
    for (int step = 0; step < 2; ++step) {
      store.zero_grad();
      for (size_t k = 0; k < model.size(); ++k)
        store.grad(model[k]).fill_(static_cast<double>(k + 1) * (step + 1));
      store.finish_grad_sync();
      optimizer.step(1.0, 4);
    }
    values.push_back(store.flat_values().cpu());
  }
  EXPECT_TRUE(at::allclose(values[0], values[1], 1e-5, 1e-7));
}

}  // namespace
}  // namespace megatron
