#include "tests/unit/models/hf_golden.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/generator.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

void expect_rows(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  for (int64_t i = 0; i < expected.size(0); ++i)
    EXPECT_LE((actual[i] - expected[i]).norm().item<double>(),
              kHfTolerance * expected[i].norm().item<double>())
        << what << ", row " << i;
}

ForwardContext context_on(const at::Tensor& tokens, at::Device device) {
  ForwardContext context = context_for(tokens, /*training=*/false);
  context.place.sample = context.place.sample.to(device);
  context.place.position = context.place.position.to(device);
  return context;
}

}  // namespace

std::string hf_golden_folder(const std::string& name) {
  const std::string here = "tests/golden/hf/" + name;
  return std::filesystem::exists(here) ? here : MEGATRON_SOURCE_DIR "/" + here;
}

HfGolden::HfGolden(const std::string& name) {
  tensors = read_golden_tensors(SafetensorsFile(hf_golden_folder(name) + "/golden.safetensors"));
}

at::Tensor HfGolden::grad(const std::string& name, at::IntArrayRef shape) const {
  return tensors.at("grad/" + name).view(shape);
}

std::vector<int32_t> HfGolden::ids(int64_t count) const {
  const int32_t* begin = tensors.at("tokens").const_data_ptr<int32_t>();
  return {begin, begin + count};
}

at::Tensor HfGolden::tokens(int64_t count) const {
  return tensors.at("tokens").narrow(0, 0, count).to(at::kLong).unsqueeze(0);
}

int64_t HfGolden::length() const { return tensors.at("tokens").size(0); }

at::Tensor HfGolden::both() const {
  return at::stack({tensors.at("tokens"), tensors.at("second")}).to(at::kLong);
}

at::Tensor HfGolden::gradient_tokens() const {
  const auto found = tensors.find("gradient_tokens");
  return found == tensors.end() ? tokens(40) : found->second.to(at::kLong);
}

LoadModelRequest hf_request(const std::string& name, at::Device device) {
  LoadModelRequest request;
  request.load = hf_golden_folder(name);
  request.dtype = at::kFloat;
  request.device = device;
  return request;
}

void load_hf_values(const HfFolder& folder, const ParallelGroups& groups, const StageSlice& slice,
                    Model& model) {
  std::vector<ShardedTensor> wanted;
  model.visit([&](const std::string& ours, Parameter& parameter) {
    wanted.push_back(sharded_tensor(parameter, groups, ours, parameter.value));
  });
  LoadOptions options;
  options.convert_dtype = true;
  if (!slice.embedding || !slice.head) options.wanted_elsewhere = {"*"};
  folder.checkpoint.load(wanted, options);
}

void expect_hf_logits(const HfGolden& golden,
                      const std::function<at::Tensor(const at::Tensor& tokens)>& forward,
                      const std::string& what) {
  const at::NoGradGuard no_grad;
  const at::Tensor few = golden["logits_short"];
  expect_rows(forward(golden.tokens(few.size(0))), few, what + ", short");
  expect_rows(
      forward(golden.tokens(golden.length())).index_select(0, golden["positions"].to(at::kLong)),
      golden["logits_long"], what + ", long");
}

void expect_hf_logits_of_both(const HfGolden& golden, const at::Tensor& logits,
                              const std::string& what) {
  const at::Tensor rows = logits.index_select(0, golden["positions"].to(at::kLong))
                              .narrow(2, 0, golden["logits_long"].size(1));  // without padding
  expect_rows(rows.select(1, 0), golden["logits_long"], what + ", first sequence");
  expect_rows(rows.select(1, 1), golden["logits_second"], what + ", second sequence");
}

void expect_hf_logits_on(const std::string& name, at::Device device) {
  const HfGolden golden(name);
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(hf_request(name, device), groups);
  expect_hf_logits(
      golden,
      [&](const at::Tensor& tokens) {
        const at::Tensor ids = tokens.squeeze(0).to(at::kInt);
        return full_logits(*loaded.model,
                           {ids.const_data_ptr<int32_t>(), static_cast<size_t>(ids.numel())});
      },
      name);
}

void expect_hf_greedy_tokens_on(const std::string& name, at::Device device) {
  const HfGolden golden(name);
  const ParallelGroups groups;
  LoadedModel loaded = load_model(hf_request(name, device), groups);
  std::string prompt;  // for the null tokenizer
  for (const int32_t id : golden.ids(8)) prompt += std::to_string(id) + " ";
  GenerateOptions options;
  options.sampling.greedy = true;
  options.tokens_to_generate = golden["greedy"].size(0);
  options.stop_at_eod = false;
  const std::vector<std::string> prompts = {prompt};
  const std::vector<Generation> result =
      generate(*loaded.model, *loaded.tokenizer, prompts, options);
  const int32_t* expected = golden["greedy"].const_data_ptr<int32_t>();
  EXPECT_EQ(result[0].tokens, std::vector<int32_t>(expected, expected + golden["greedy"].numel()))
      << name;
}

void expect_hf_greedy_tokens_over(const std::string& name, int tensor, int stages) {
  const HfGolden golden(name);
  const at::Tensor& greedy = golden["greedy"];
  const int32_t* expected = greedy.const_data_ptr<int32_t>();
  RequestSpec spec;
  spec.prompt = golden.ids(8);
  spec.sampling.temperature = 0.0;
  spec.stop.max_tokens = greedy.numel();
  const ServedWorkload workload{{{spec}}, 8 + greedy.numel()};
  LocalLinks links(tensor * stages);
  std::vector<ServedText> texts;
  run_ranks(tensor * stages, [&](const std::shared_ptr<Backend>& world) {
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = tensor;
    parallel.pipeline_model_parallel_size = stages;
    parallel.expert_tensor_parallel_size = 1;  // experts with biases are not divided
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    const LoadedModel loaded = load_model(hf_request(name), groups);
    std::vector<ServedText> got = serve_workload(*loaded.model, workload, links, world->rank());
    if (world->rank() == 0) texts = std::move(got);
  });
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_EQ(texts[0].tokens, std::vector<int32_t>(expected, expected + greedy.numel()))
      << name << ", " << tensor << " tensor ranks, " << stages << " stages";
}

void expect_hf_gradients_on(const std::string& name, at::Device device) {
  const HfGolden golden(name);
  const ParallelGroups groups;
  const HfFolder folder = open_hf_folder(hf_golden_folder(name));
  ModelConfig config = folder.model.config;
  config.transformer.mtp_num_layers = 0;  // of the main loss
  GPTModel model(config, groups);
  PlainParameterStore store(model, at::kFloat, device, /*gradients=*/true);
  std::map<std::string, at::Tensor> grads;
  std::vector<ShardedTensor> wanted;  // in host memory
  std::vector<std::pair<Parameter*, at::Tensor>> values;
  model.visit([&](const std::string& ours, Parameter& parameter) {
    values.emplace_back(&parameter, at::empty_like(parameter.value, at::kCPU));
    wanted.push_back(sharded_tensor(parameter, groups, ours, values.back().second));
    grads[ours] = store.grad(parameter);
  });
  model.visit_state([&](const std::string& ours, at::Tensor& state) {
    state = state.to(at::kCPU);
    wanted.push_back(sharded_state(state, groups, ours));
  });
  LoadOptions options;
  options.convert_dtype = true;
  options.wanted_elsewhere = {"mtp.*"};
  folder.checkpoint.load(wanted, options);
  model.visit_state([&](const std::string&, at::Tensor& state) { state = state.to(device); });
  for (auto& [parameter, value] : values) parameter->value.copy_(value);
  const at::Tensor text = golden.gradient_tokens(), tokens = text.slice(1, 0, -1).contiguous(),
                   labels = text.slice(1, 1).contiguous();
  const Loss loss = model.loss(tokens.to(device), labels.to(device),
                               at::ones(labels.sizes(), device), context_on(tokens, device));
  RecomputeTape().backward(loss.sum);

  std::vector<HfTensor> tensors = hf_tensors(*folder.model.family, config);
  std::erase_if(tensors, [&](const HfTensor& tensor) { return !grads.contains(tensor.ours); });
  ASSERT_EQ(tensors.size(), count_gradients(golden.tensors));
  std::map<std::string, at::Tensor> expected;
  double all = 0.0;
  for (const HfTensor& tensor : tensors) {
    std::string theirs = tensor.name;
    for (const auto& [alias, known] : folder.model.family->aliases)
      if (theirs == known && !golden.tensors.contains("grad/" + theirs)) theirs = alias;
    expected[tensor.name] = golden.grad(theirs, tensor.shape);
    all += expected[tensor.name].square().sum().item<double>();
  }
  for (const HfTensor& tensor : tensors)
    expect_close(in_their_form(tensor, grads.at(tensor.ours).to(at::kCPU)),
                 expected.at(tensor.name), kHfTolerance, std::sqrt(all),
                 name + ": gradient of " + tensor.name);
}

}  // namespace megatron
