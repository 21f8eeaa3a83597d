// The GPT model against PyTorch: logits, loss and every gradient, and 50 steps of AdamW.
#include "tests/unit/models/gpt_golden.h"

#include <gtest/gtest.h>

#include <cmath>

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

struct Tolerance {
  at::ScalarType dtype;
  double rtol;
};

class GPTGolden : public testing::TestWithParam<std::string> {};

void check(const Golden& golden, Tolerance tolerance) {
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  PlainParameterStore store(model, tolerance.dtype, at::kCPU, /*gradients=*/true);
  load_weights(model, golden, "weight/");
  const auto& t = golden.tensors;
  const ForwardContext context = context_for(t.at("tokens"), /*training=*/true);

  const int64_t v = golden.config.vocab_size;
  const at::Tensor logits = model.forward(t.at("tokens"), context).narrow(-1, 0, v).transpose(0, 1);
  expect_close(logits, t.at("logits"), tolerance.rtol, 0.0, "logits");

  const Loss loss = model.loss(t.at("tokens"), t.at("labels"), t.at("loss_mask"), context);
  expect_close(loss.sum.reshape({1}), t.at("loss"), tolerance.rtol, 0.0, "loss");
  EXPECT_EQ(loss.weight.item<double>(), t.at("loss_weight").item<double>());
  RecomputeTape().backward(loss.sum);
  double all = 0.0;
  for (const auto& [name, tensor] : t)
    if (name.rfind("grad/", 0) == 0) all += std::pow(tensor.norm().item<double>(), 2);
  all = std::sqrt(all);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = t.at("grad/" + name);
    const at::Tensor& grad = store.grad(parameter);
    expect_close(grad.narrow(0, 0, expected.size(0)), expected, tolerance.rtol, all,
                 "gradient of " + name);
    if (const int64_t padded = grad.size(0) - expected.size(0); padded > 0) {
      EXPECT_EQ(grad.narrow(0, expected.size(0), padded).abs().max().item<double>(), 0.0)
          << "gradient of the padded rows of " << name;
    }
  });
}

TEST_P(GPTGolden, Fp64) { check(read_golden(GetParam()), {at::kDouble, 1e-10}); }
TEST_P(GPTGolden, Fp32) { check(read_golden(GetParam()), {at::kFloat, 1e-5}); }

INSTANTIATE_TEST_SUITE_P(All, GPTGolden,
                         testing::Values("gpt2", "llama", "qwen_like", "neox_like", "interleaved",
                                         "scaled_rope", "no_position"),
                         [](const auto& param) { return param.param; });

// The batch of make_goldens.py.
struct TextBatch {
  at::Tensor tokens, labels, mask;
};
TextBatch make_batch(const ModelConfig& config, int64_t step) {
  const at::Tensor i = at::arange(2, at::kLong).unsqueeze(1);
  const at::Tensor j = at::arange(config.transformer.seq_length + 1, at::kLong).unsqueeze(0);
  const at::Tensor text =
      (i * 11 + j * j * 7 + j * 3 + step * 5 + at::floor_divide(j * (step + 1), 4))
          .remainder(config.vocab_size);
  at::Tensor mask = at::ones({2, config.transformer.seq_length});
  for (int64_t k = 0; k < mask.size(1); k += 5) mask.select(1, k).zero_();
  return {text.slice(1, 0, -1).contiguous(), text.slice(1, 1).contiguous(), mask};
}

std::vector<double> train_50_steps(const Golden& golden, GPTModel& model, at::ScalarType dtype,
                                   const ParallelGroups& groups, DistributedDataParallel& store) {
  EXPECT_EQ(store.dtype(), dtype);
  load_weights(model, golden, "start/");
  OptimizerConfig options;
  options.lr = 1e-2;
  options.min_lr = 1e-3;
  options.lr_decay_style = LrDecayStyle::kCosine;
  options.lr_warmup_iters = 5;
  options.weight_decay = 0.1;
  options.adam_beta2 = 0.95;
  options.clip_grad = 1.0;
  Optimizer optimizer(options, make_schedule(options, {50, std::nullopt, 4}), store);
  (void)groups;
  std::vector<double> losses;
  for (int64_t step = 0; step < 50; ++step) {
    store.zero_grad(/*passes=*/2);
    double sum = 0.0, weight = 0.0;
    for (int64_t micro = 0; micro < 2; ++micro) {
      const TextBatch batch = make_batch(golden.config, step * 2 + micro);
      const Loss loss =
          model.loss(batch.tokens, batch.labels, batch.mask, context_for(batch.tokens, true));
      RecomputeTape().backward(loss.sum);
      sum += loss.sum.item<double>();
      weight += loss.weight.item<double>();
    }
    store.finish_grad_sync();
    optimizer.step(weight, 4);
    losses.push_back(sum / weight);
  }
  return losses;
}

TEST(GPTTraining, FiftyAdamWStepsFp64) {
  const Golden golden = read_golden("adamw50");
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  DistributedDataParallel store(model, groups, at::kDouble, at::kCPU);
  const std::vector<double> losses = train_50_steps(golden, model, at::kDouble, groups, store);
  for (int64_t i = 0; i < 50; ++i)
    EXPECT_NEAR(losses[i], golden.tensors.at("losses")[i].item<double>(), 1e-8) << "step " << i;
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = golden.tensors.at("end/" + name);
    const at::Tensor actual = parameter.value.narrow(0, 0, expected.size(0));
    EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-8) << name;
    if (parameter.valid_rows >= 0) {
      EXPECT_EQ(parameter.value.slice(0, parameter.valid_rows).abs().max().item<double>(), 0.0)
          << "padded rows of " << name;
    }
  });
}

TEST(GPTTraining, FiftyAdamWStepsFp32) {
  const Golden golden = read_golden("adamw50");
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  DistributedDataParallel store(model, groups, at::kFloat, at::kCPU);
  const std::vector<double> losses = train_50_steps(golden, model, at::kFloat, groups, store);
  for (int64_t i = 0; i < 50; ++i)
    EXPECT_NEAR(losses[i], golden.tensors.at("losses")[i].item<double>(), 1e-4) << "step " << i;
}

}  // namespace
}  // namespace megatron
