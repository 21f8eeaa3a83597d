// The GPT model on a GPU: against the fp64 goldens in fp32, against PyTorch's own bf16 error, and
// against the CPU.
//
// The bf16 golden is large and generated on the test machine: python
// tests/golden/gpt/make_bf16_golden.py DIR, then MEGATRON_BF16_GOLDEN=DIR gpu_tests
// --gtest_filter='GPTGpu.*'.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "megatron/comm/parallel_groups.h"
#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

// The goldens of this repository: beside the sources, or under the current folder when the program
// was copied elsewhere.
std::string golden_folder() {
  const std::string here = "tests/golden/gpt";
  return std::filesystem::exists(here) ? here : MEGATRON_SOURCE_DIR "/" + here;
}

ForwardContext gpu_context(const at::Tensor& tokens) {
  ForwardContext context = context_for(tokens, /*training=*/true);
  context.place.sample = context.place.sample.to(kGpu);
  context.place.position = context.place.position.to(kGpu);
  return context;
}

// Logits and gradients of one pass, by the golden's names.
std::map<std::string, at::Tensor> pass(const Golden& golden, at::ScalarType dtype) {
  const ParallelGroups groups;
  GPTModel model(golden.config, groups);
  DistributedDataParallel store(model, groups, dtype, kGpu);
  load_weights(model, golden, "weight/");
  const auto& t = golden.tensors;
  const at::Tensor tokens = t.at("tokens").to(kGpu);
  std::map<std::string, at::Tensor> results;
  results["logits"] = model.forward(tokens, gpu_context(tokens))
                          .narrow(-1, 0, golden.config.vocab_size)
                          .transpose(0, 1)
                          .detach()
                          .to(at::kCPU)
                          .to(at::kDouble);
  const Loss loss =
      model.loss(tokens, t.at("labels").to(kGpu), t.at("loss_mask").to(kGpu), gpu_context(tokens));
  RecomputeTape().backward(loss.sum);
  results["loss"] = loss.sum.detach().reshape({1}).to(at::kCPU).to(at::kDouble);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = t.at("grad/" + name);
    results["grad/" + name] =
        store.grad(parameter).narrow(0, 0, expected.size(0)).to(at::kCPU).to(at::kDouble);
  });
  return results;
}

TEST(GPTGpu, Fp32GoldensOfPyTorch) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const char* name :
       {"gpt2", "llama", "qwen_like", "neox_like", "interleaved", "scaled_rope", "no_position"}) {
    const Golden golden = read_golden(name, golden_folder());
    double all = 0.0;
    for (const auto& [key, tensor] : golden.tensors)
      if (key.rfind("grad/", 0) == 0) all += std::pow(tensor.norm().item<double>(), 2);
    for (const auto& [key, tensor] : pass(golden, at::kFloat))
      expect_close(tensor, golden.tensors.at(key), 2e-5, std::sqrt(all),
                   std::string(name) + " " + key);
  }
}

TEST(GPTGpu, Bf16WithinTwiceTheErrorOfPyTorch) {
  const char* folder = std::getenv("MEGATRON_BF16_GOLDEN");
  if (!at::hasCUDA() || folder == nullptr)
    GTEST_SKIP() << "no GPU, or MEGATRON_BF16_GOLDEN is not set";
  for (const char* name : {"bf16_llama", "bf16_gpt2"}) {
    const Golden golden = read_golden(name, folder);
    const auto ours = pass(golden, at::kBFloat16);
    double worst = 0.0;
    for (const auto& [key, tensor] : ours) {
      const at::Tensor expected = golden.tensors.at(key).to(at::kDouble);
      const double error =
          (tensor - expected).norm().item<double>() / expected.norm().item<double>();
      const double theirs = golden.tensors.at("torch_error/" + key).item<double>();
      worst = std::max(worst, error / theirs);
      EXPECT_LE(error, 2.0 * theirs)
          << name << " " << key << ": ours " << error << ", PyTorch's " << theirs;
    }
    std::printf("%s: largest ratio of our bf16 error to PyTorch's: %.3f\n", name, worst);
  }
}

// Three steps of training in fp32; parameters at the end.
std::vector<at::Tensor> train(const ModelConfig& config, at::Device device) {
  const ParallelGroups groups;
  GPTModel model(config, groups);
  DistributedDataParallel store(model, groups, at::kFloat, device);
  initialize_parameters(model, 99, groups);
  OptimizerConfig options;
  options.optimizer = "sgd";  // Adam's first steps are the sign of the gradient
  options.lr = 0.1;
  Optimizer optimizer(options, make_schedule(options, {3, std::nullopt, 4}), store);
  for (int64_t step = 0; step < 3; ++step) {
    const at::Tensor text = at::arange(step, step + 4 * 13, at::kLong)
                                .mul(7)
                                .remainder(config.vocab_size)
                                .view({4, 13})
                                .to(device);
    const at::Tensor tokens = text.slice(1, 0, -1).contiguous(),
                     labels = text.slice(1, 1).contiguous();
    ForwardContext context = context_for(tokens, /*training=*/true, step * 4);
    context.place.sample = context.place.sample.to(device);
    context.place.position = context.place.position.to(device);
    store.zero_grad();
    const Loss loss = model.loss(tokens, labels,
                                 at::ones({4, 12}, at::dtype(at::kFloat).device(device)), context);
    RecomputeTape().backward(loss.sum);
    store.finish_grad_sync();
    optimizer.step(loss.weight, 4);
  }
  std::vector<at::Tensor> values;
  for (Parameter* parameter : model.parameters()) values.push_back(parameter->value.to(at::kCPU));
  return values;
}

TEST(GPTGpu, TrainsAsTheCpuDoesWithDropout) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  ModelConfig config = read_golden("gpt2", golden_folder()).config;
  config.transformer.hidden_dropout = 0.1;
  config.transformer.attention_dropout = 0.1;
  const auto cpu = train(config, at::kCPU), gpu = train(config, kGpu);
  ASSERT_EQ(cpu.size(), gpu.size());
  for (size_t i = 0; i < cpu.size(); ++i)
    expect_close(gpu[i], cpu[i], 1e-5, 1.0, std::to_string(i));
}

}  // namespace
}  // namespace megatron
