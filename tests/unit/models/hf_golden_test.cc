// Hugging Face models against transformers: logits at short and long positions, greedy generation
// and gradients, on one rank, on tensor-parallel ranks, and in two pipeline stages.
#include "tests/unit/models/hf_golden.h"

#include <gtest/gtest.h>

#include <mutex>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
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
  ModelConfig config = folder.model.config;
  config.transformer.mtp_num_layers = 0;  // they add nothing to the logits
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
    stage->visit_state([&](const std::string& name, at::Tensor& state) {
      wanted.push_back(sharded_state(state, groups, name));
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

class HfExpertsGolden : public HfGoldenTest {};

// The ranks have different tokens at a time.
TEST_P(HfExpertsGolden, LogitsOnTwoExpertParallelRanks) {
  const HfGolden golden(GetParam());
  std::mutex mutex;
  ParallelConfig config;
  config.expert_model_parallel_size = 2;
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    const ParallelGroups groups = make_parallel_groups(config, world);
    const LoadedModel loaded = load_model(hf_request(GetParam()), groups);
    std::vector<int64_t> lengths = {golden["logits_short"].size(0), golden.length()};
    if (groups.ep.rank() == 1) std::swap(lengths[0], lengths[1]);
    std::map<int64_t, at::Tensor> logits;
    for (const int64_t length : lengths) {
      const at::Tensor tokens = golden.tokens(length);
      logits[length] = loaded.model->forward(tokens, context_for(tokens, /*training=*/false))
                           .select(1, 0)
                           .narrow(1, 0, loaded.config.vocab_size);
    }
    const std::lock_guard lock(mutex);
    expect_hf_logits(
        golden, [&](const at::Tensor& tokens) { return logits.at(tokens.size(1)); },
        cat("expert rank ", groups.ep.rank()));
  });
}

INSTANTIATE_TEST_SUITE_P(Families, HfExpertsGolden,
                         testing::Values("mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
                                         "deepseek_v2", "deepseek_v2_lite", "deepseek_v3",
                                         "glm4_moe", "gpt_oss"),
                         [](const auto& param) { return param.param; });

// The mean cross entropy of a layer that predicts the token after the next one.
TEST(HfGoldens, TheLossOfMultiTokenPrediction) {
  for (const char* name : {"deepseek_v3", "glm4_moe"}) {
    const HfGolden golden(name);
    const ParallelGroups groups;
    const LoadedModel loaded = load_model(hf_request(name), groups);
    EXPECT_NEAR(mtp_loss(*loaded.model, golden.tokens(40)), golden["mtp_loss"].item<double>(), 1e-4)
        << name;
  }
}

TEST_P(HfGoldenTest, GreedyGeneration) { expect_hf_greedy_tokens_on(GetParam(), at::kCPU); }

TEST_P(HfGoldenTest, GreedyGenerationOverTwoRanks) {
  const TransformerConfig config = read_hf_config(hf_golden_folder(GetParam())).config.transformer;
  expect_hf_greedy_tokens_over(GetParam(), 2, 1);
  expect_hf_greedy_tokens_over(GetParam(), 1, config.num_layers % 2 == 0 ? 2 : 3);
}

TEST_P(HfGoldenTest, Gradients) { expect_hf_gradients_on(GetParam(), at::kCPU); }

INSTANTIATE_TEST_SUITE_P(Families, HfGoldenTest,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfGoldens),
                                                                    std::end(kHfGoldens))),
                         [](const auto& param) { return param.param; });

class HfStatesGolden : public HfGoldenTest {};

// Several chunks of each sequence.
TEST_P(HfStatesGolden, LogitsOfTwoSequences) {
  const at::NoGradGuard no_grad;
  const HfGolden golden(GetParam());
  const ParallelGroups groups;
  const LoadedModel loaded = load_model(hf_request(GetParam()), groups);
  const at::Tensor tokens = golden.both();
  expect_hf_logits_of_both(
      golden, loaded.model->forward(tokens, context_for(tokens, /*training=*/false)), "one rank");
}

TEST_P(HfStatesGolden, LogitsOnTwoContextParallelRanks) {
  const HfGolden golden(GetParam());
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const at::NoGradGuard no_grad;
    ParallelGroups groups;
    groups.cp = ProcessGroup(world, "cp");
    const LoadedModel loaded = load_model(hf_request(GetParam()), groups);
    const at::Tensor tokens = golden.both();
    ForwardContext context = context_for(tokens, /*training=*/false);
    context.place.position = zigzag_slice(context.place.position, 0, groups.cp);
    const at::Tensor logits = loaded.model->forward(zigzag_slice(tokens, 1, groups.cp), context);
    expect_hf_logits_of_both(golden, zigzag_gather(logits, 0, groups.cp),
                             cat("context rank ", groups.cp.rank()));
  });
}

INSTANTIATE_TEST_SUITE_P(Families, HfStatesGolden,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfStateGoldens),
                                                                    std::end(kHfStateGoldens))),
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
  const auto experts = [&](const std::string& name) {
    const TransformerConfig t = config(name);
    std::string layers;
    for (int64_t i = 1; i <= t.num_layers; ++i) layers += t.is_moe_layer(i) ? 'E' : '-';
    return layers;
  };
  EXPECT_EQ(experts("mixtral"), "EE");
  EXPECT_EQ(experts("qwen2_moe"), "E-E");
  EXPECT_EQ(experts("qwen3_moe"), "-E");
  EXPECT_EQ(experts("deepseek_v2"), "-EE");
  EXPECT_TRUE(config("qwen2_moe").moe_router_pre_softmax &&
              config("qwen2_moe").moe_shared_expert_gate);
  EXPECT_FALSE(config("qwen3_moe").moe_router_pre_softmax);
  EXPECT_TRUE(config("deepseek_v2").moe_router_group_score == GroupScore::kMax);
  EXPECT_DOUBLE_EQ(config("deepseek_v2").mscale_all_dim, 0.5);
  EXPECT_DOUBLE_EQ(config("deepseek_v2_lite").mscale, 1.0) << "whatever the file says";
  EXPECT_FALSE(config("deepseek_v2_lite").q_lora_rank);
  EXPECT_EQ(config("deepseek_v3").mtp_num_layers, 1);
  EXPECT_EQ(config("deepseek_v3").moe_router_num_groups, 4);
  EXPECT_EQ(experts("glm4_moe"), "-E");
  EXPECT_TRUE(config("glm4_moe").add_qkv_bias && config("glm4_moe").qk_layernorm);
  EXPECT_DOUBLE_EQ(config("glm4_moe").rotary_percent, 0.5);
  EXPECT_EQ(config("gpt_oss").softmax_type, SoftmaxType::kLearnable);
  EXPECT_EQ(config("gpt_oss").activation_func_clamp_value, 0.7);
  EXPECT_FALSE(config("gpt_oss").yarn_correction_range_round_to_int);
  EXPECT_TRUE(!config("gpt_oss").window(1).empty() && config("gpt_oss").window(2).empty());
  EXPECT_TRUE(config("olmo2").qk_layernorm_over_heads);
  EXPECT_EQ(config("olmo2").norm_placement, NormPlacement::kPost);
}

}  // namespace
}  // namespace megatron
