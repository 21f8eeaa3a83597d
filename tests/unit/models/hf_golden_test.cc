// Hugging Face models against transformers: logits at short and long positions, greedy generation
// and gradients, on one rank, on tensor-parallel ranks, and in two pipeline stages.
#include "tests/unit/models/hf_golden.h"

#include <gtest/gtest.h>

#include <mutex>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

class HfGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(HfGoldenTest, Logits) { expect_hf_logits_on(GetParam(), at::kCPU); }

TEST_P(HfGoldenTest, LogitsOnTwoTensorParallelRanks) {
  const HfGolden golden(GetParam());
  std::map<int64_t, std::vector<at::Tensor>> parts;  // by sequence length, of both ranks
  std::mutex mutex;
  int64_t vocab_size = 0;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    const LoadedModel loaded = load_model(hf_request(GetParam()), groups);
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
  expect_hf_logits(
      golden,
      [&](const at::Tensor& tokens) {
        return at::cat(parts.at(tokens.size(1)), 1).narrow(1, 0, vocab_size);
      },
      "two tensor-parallel ranks");
}

TEST_P(HfGoldenTest, LogitsInTwoPipelineStages) {
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const HfFolder folder = open_hf_folder(hf_golden_folder(GetParam()));
  const ModelConfig& config = folder.model.config;
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
  expect_hf_logits(
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

TEST_P(HfGoldenTest, GreedyGeneration) { expect_hf_greedy_tokens_on(GetParam(), at::kCPU); }

TEST_P(HfGoldenTest, Gradients) { expect_hf_gradients_on(GetParam(), at::kCPU); }

INSTANTIATE_TEST_SUITE_P(Families, HfGoldenTest,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfGoldens),
                                                                    std::end(kHfGoldens))),
                         [](const auto& param) { return param.param; });

// What each golden is there to exercise; a configuration that read as the plain model would prove
// less.
TEST(HfGoldens, ExerciseTheirBlocks) {
  const auto config = [](const std::string& name) {
    return read_hf_config(hf_golden_folder(name)).config.transformer;
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
