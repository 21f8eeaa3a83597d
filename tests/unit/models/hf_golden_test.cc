// Models of Hugging Face against transformers: logits at short and long positions, greedy
// generation and gradients, on one rank, on tensor-parallel ranks, and in two pipeline stages.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/inference/generator.h"
#include "megatron/models/huggingface/hf_folder.h"
#include "megatron/models/load_model.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

constexpr double kTolerance = 1e-4;

std::string folder_of(const std::string& name) {
  return std::string(MEGATRON_SOURCE_DIR "/tests/golden/hf/") + name;
}

struct HfGolden {
  std::map<std::string, at::Tensor> tensors;
  nlohmann::json grad_scales;

  explicit HfGolden(const std::string& name) {
    const SafetensorsFile file(folder_of(name) + "/golden.safetensors");
    tensors = read_golden_tensors(file);
    grad_scales = nlohmann::json::parse(file.header().metadata.at("grad_scales"));
  }
  // The gradient of one of their tensors, fp64, under the name that transformers gives it.
  at::Tensor grad(const std::string& name, at::IntArrayRef shape) const {
    return golden_gradient(tensors.at("grad/" + name), grad_scales.at(name).get<double>(), shape);
  }
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
  std::vector<int32_t> ids(int64_t count) const {
    const int32_t* begin = tensors.at("tokens").const_data_ptr<int32_t>();
    return {begin, begin + count};
  }
  at::Tensor tokens(int64_t count) const {
    return tensors.at("tokens").narrow(0, 0, count).to(at::kLong).unsqueeze(0);
  }
  int64_t length() const { return tensors.at("tokens").size(0); }
};

LoadModelRequest request_for(const std::string& name) {
  LoadModelRequest request;
  request.load = folder_of(name);
  request.dtype = at::kFloat;
  return request;
}

void expect_logits(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  for (int64_t i = 0; i < expected.size(0); ++i)
    EXPECT_LE((actual[i] - expected[i]).norm().item<double>(),
              kTolerance * expected[i].norm().item<double>())
        << what << ", row " << i;
}

// Both sequences through `forward`, which returns [s, v] for tokens [1, s].
void expect_goldens(const HfGolden& golden,
                    const std::function<at::Tensor(const at::Tensor& tokens)>& forward,
                    const std::string& what) {
  const at::NoGradGuard no_grad;
  const at::Tensor few = golden["logits_short"];
  expect_logits(forward(golden.tokens(few.size(0))), few, what + ", short");
  expect_logits(
      forward(golden.tokens(golden.length())).index_select(0, golden["positions"].to(at::kLong)),
      golden["logits_long"], what + ", long");
}

class HfGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(HfGoldenTest, Logits) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(request_for(GetParam()), groups);
  expect_goldens(
      golden,
      [&](const at::Tensor& tokens) {
        const at::Tensor ids = tokens.squeeze(0).to(at::kInt);
        return full_logits(*loaded.model,
                           {ids.const_data_ptr<int32_t>(), static_cast<size_t>(ids.numel())});
      },
      "one rank");
}

TEST_P(HfGoldenTest, LogitsOnTwoTensorParallelRanks) {
  const HfGolden golden(GetParam());
  std::map<int64_t, std::vector<at::Tensor>> parts;  // by sequence length, of both ranks
  std::mutex mutex;
  int64_t vocab_size = 0;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    const LoadedModel loaded = load_model(request_for(GetParam()), groups);
    for (const int64_t count : {golden["logits_short"].size(0), golden.length()}) {
      const at::Tensor tokens = golden.tokens(count);
      const at::Tensor logits =
          loaded.model->forward(tokens, context_for(tokens, /*training=*/false)).select(1, 0);
      const std::lock_guard lock(mutex);
      parts[count].resize(2);
      parts[count][static_cast<size_t>(groups.tp.rank())] = logits;
      vocab_size = loaded.config.vocab_size;
    }
  });
  expect_goldens(
      golden,
      [&](const at::Tensor& tokens) {
        return at::cat(parts.at(tokens.size(1)), 1).narrow(1, 0, vocab_size);
      },
      "two tensor-parallel ranks");
}

TEST_P(HfGoldenTest, LogitsInTwoPipelineStages) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const HfFolder folder = open_hf_folder(folder_of(GetParam()));
  const GPTConfig& config = folder.model.config;
  const int64_t layers = config.transformer.num_layers;
  GPTModel first(config, groups, {0, 1, true, false}),
      second(config, groups, {1, layers - 1, false, true});
  std::vector<std::unique_ptr<PlainParameterStore>> stores;
  for (GPTModel* stage : {&first, &second}) {
    stores.push_back(
        std::make_unique<PlainParameterStore>(*stage, at::kFloat, at::kCPU, /*gradients=*/false));
    std::vector<ShardedTensor> wanted;
    stage->visit([&](const std::string& name, Parameter& parameter) {
      wanted.push_back(sharded_tensor(parameter, groups, name, parameter.value));
    });
    LoadOptions options;
    options.convert_dtype = true;
    options.wanted_elsewhere = {"*"};
    folder.checkpoint.load(wanted, options);
  }
  expect_goldens(
      golden,
      [&](const at::Tensor& tokens) {
        const ForwardContext context = context_for(tokens, /*training=*/false);
        const at::Tensor middle = first.hidden(tokens, {}, context);
        return second.logits(second.hidden({}, middle, context))
            .select(1, 0)
            .narrow(1, 0, config.vocab_size);
      },
      "two stages");
}

TEST_P(HfGoldenTest, GreedyGeneration) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  LoadedModel loaded = load_model(request_for(GetParam()), groups);
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
  EXPECT_EQ(result[0].tokens, std::vector<int32_t>(expected, expected + golden["greedy"].numel()));
}

// The gradient of one of their tensors, put together from ours.
at::Tensor in_their_form(const HfTensor& tensor, const at::Tensor& ours) {
  std::vector<int64_t> shape = ours.sizes().vec();
  shape[0] = 0;
  for (const RowRun& run : tensor.runs) shape[0] += run.count;
  at::Tensor theirs = at::empty(shape, ours.options());
  for (const RowRun& run : tensor.runs)
    theirs.narrow(0, run.theirs, run.count).copy_(ours.narrow(0, run.ours, run.count));
  return tensor.transposed ? theirs.t() : theirs;
}

TEST_P(HfGoldenTest, Gradients) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const HfFolder folder = open_hf_folder(folder_of(GetParam()));
  const GPTConfig& config = folder.model.config;
  GPTModel model(config, groups);
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/true);
  std::map<std::string, at::Tensor> grads;
  std::vector<ShardedTensor> wanted;
  model.visit([&](const std::string& name, Parameter& parameter) {
    wanted.push_back(sharded_tensor(parameter, groups, name, parameter.value));
    grads[name] = store.grad(parameter);
  });
  LoadOptions options;
  options.convert_dtype = true;
  folder.checkpoint.load(wanted, options);
  const at::Tensor text = golden.tokens(40), tokens = text.slice(1, 0, -1).contiguous(),
                   labels = text.slice(1, 1).contiguous();
  const Loss loss =
      model.loss(tokens, labels, at::ones({1, 39}), context_for(tokens, /*training=*/false));
  RecomputeTape().backward(loss.sum);

  const std::vector<HfTensor> tensors = hf_tensors(*folder.model.family, config);
  ASSERT_EQ(tensors.size(), golden.grad_scales.size());
  std::map<std::string, at::Tensor> expected;
  double all = 0.0;
  for (const HfTensor& tensor : tensors) {
    std::string name = tensor.name;
    for (const auto& [alias, known] : folder.model.family->aliases)
      if (name == known) name = alias;
    expected[tensor.name] = golden.grad(name, tensor.shape);
    all += expected[tensor.name].square().sum().item<double>();
  }
  for (const HfTensor& tensor : tensors)
    expect_close(in_their_form(tensor, grads.at(tensor.ours)), expected.at(tensor.name), kTolerance,
                 std::sqrt(all), "gradient of " + tensor.name);
}

INSTANTIATE_TEST_SUITE_P(Families, HfGoldenTest,
                         testing::Values("llama2", "llama3", "mistral", "qwen2", "qwen3", "gpt2",
                                         "gpt_neox", "gpt_neox_sequential", "phi3", "gemma2",
                                         "gemma3", "olmo2", "starcoder2"),
                         [](const auto& param) { return param.param; });

// What each golden is there to exercise; a configuration that read as the plain model would prove
// less.
TEST(HfGoldens, ExerciseTheirBlocks) {
  const auto config = [](const std::string& name) {
    return read_hf_config(folder_of(name)).config.transformer;
  };
  EXPECT_EQ(config("llama3").rope_scaling_type, RopeScaling::kLlama3);
  EXPECT_EQ(config("qwen2").rope_scaling_type, RopeScaling::kLinear);
  EXPECT_EQ(config("qwen3").rope_scaling_type, RopeScaling::kYarn);
  EXPECT_EQ(config("phi3").rope_scaling_type, RopeScaling::kLongRope);
  EXPECT_DOUBLE_EQ(config("phi3").rotary_percent, 0.75);
  EXPECT_TRUE(config("gpt_neox").parallel_residual);
  EXPECT_FALSE(config("gpt_neox_sequential").parallel_residual);
  EXPECT_EQ(config("mistral").window_size, (std::vector<int64_t>{8, 0}));
  EXPECT_TRUE(config("qwen2").window(1).empty() && !config("qwen2").window(2).empty());
  EXPECT_TRUE(!config("gemma2").window(1).empty() && config("gemma2").window(2).empty());
  EXPECT_EQ(config("gemma2").norm_placement, NormPlacement::kSandwich);
  EXPECT_DOUBLE_EQ(config("gemma2").attn_logit_softcapping, 3.0);
  EXPECT_EQ(config("gemma3").rotary_base_local, 100);
  EXPECT_TRUE(config("gemma3").window(3).empty());
  EXPECT_TRUE(config("olmo2").qk_layernorm_over_heads);
  EXPECT_EQ(config("olmo2").norm_placement, NormPlacement::kPost);
}

}  // namespace
}  // namespace megatron
