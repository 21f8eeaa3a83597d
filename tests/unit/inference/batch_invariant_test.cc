// Batch-invariant mode: what the engine reports of its tokens has the bits of the loss of a
// training forward over the same texts, whatever shared their steps.
#include "megatron/transformer/config/batch_invariant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/batch_invariant/mode_scope.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/inference/rollouts.h"

namespace megatron {
namespace {

// Rows of sizes that fill no vector, chunks that texts end in the middle of; two tensor ranks share
// a group of B and C, over which the norm goes.
ModelConfig mamba_model() {
  ModelConfig config = hybrid_served_model("M*M-");
  TransformerConfig& t = config.transformer;
  t.mamba_num_heads = 6;
  t.mamba_head_dim = 3;
  t.mamba_num_groups = 1;
  t.mamba_state_dim = 10;
  t.mamba_chunk_size = 10;
  t.attention_dropout = t.hidden_dropout = 0.0;
  return config;
}

ModelConfig delta_net_model() {
  ModelConfig config = hybrid_served_model("GE*G");
  TransformerConfig& t = config.transformer;
  t.linear_num_value_heads = 6;
  t.linear_key_head_dim = 5;
  t.linear_value_head_dim = 7;
  t.linear_chunk_size = 11;
  t.num_experts = 4;
  t.moe_router_topk = 2;
  t.attention_dropout = t.hidden_dropout = 0.0;
  return config;
}

std::vector<std::pair<std::string, ModelConfig>> models() {
  ModelConfig llama = small_served_model();
  llama.transformer.hidden_size = 96;
  ModelConfig gpt = small_served_model();
  gpt.transformer.group_query_attention = false;
  gpt.transformer.position_embedding_type = PositionEmbedding::kLearnedAbsolute;
  gpt.transformer.max_position_embeddings = 64;
  gpt.transformer.normalization = Normalization::kLayerNorm;
  gpt.transformer.swiglu = false;
  gpt.transformer.add_bias_linear = true;
  ModelConfig gemma = small_served_model();
  gemma.transformer.window_size = {5, 0};
  gemma.transformer.window_attn_skip_freq = "2";
  gemma.transformer.attn_logit_softcapping = 3.0;
  gemma.transformer.final_logit_softcapping = 5.0;
  gemma.transformer.qk_layernorm = true;
  ModelConfig mixtral = small_served_model();
  mixtral.transformer.num_experts = 4;
  mixtral.transformer.moe_router_topk = 2;
  mixtral.transformer.moe_router_pre_softmax = true;
  const ModelConfig deepseek = latent_served_model();
  ModelConfig adapted = llama;
  adapted.transformer.lora_rank = 24;
  std::vector<std::pair<std::string, ModelConfig>> all = {
      {"llama", llama},     {"gpt", gpt},           {"gemma", gemma},
      {"mixtral", mixtral}, {"deepseek", deepseek}, {"adapters", adapted}};
  for (auto& [name, config] : all)
    config.transformer.attention_dropout = config.transformer.hidden_dropout = 0.0;
  return all;
}

// Of one and of two tensor ranks. MEGATRON_ROLLOUTS: how many texts of each model and number of
// ranks, 84 without it; each is served twice.
void expect_equal_rollouts(const std::vector<std::pair<std::string, ModelConfig>>& of) {
  const BatchInvariantScope mode(true);
  const char* wanted = std::getenv("MEGATRON_ROLLOUTS");
  RolloutOptions options;
  const auto texts = static_cast<int>(options.texts);
  if (wanted != nullptr) options.schedules = std::max(1, (std::atoi(wanted) + texts - 1) / texts);
  for (options.tensor = 1; options.tensor <= 2; ++options.tensor) {
    Compared sum;
    for (const auto& [name, config] : of) {
      const Compared compared = rollouts(config, options);
      EXPECT_EQ(compared.different, 0) << name << ", " << options.tensor << " ranks";
      EXPECT_EQ(compared.texts, options.schedules * texts);
      EXPECT_GT(compared.accepted, 25 * options.schedules);
      EXPECT_GT(compared.numbers, 350 * options.schedules);
      EXPECT_EQ(compared.divided_steps > 0,
                options.tensor > 1 && config.transformer.can_divide_rows())
          << name;
      sum.texts += compared.texts;
      sum.numbers += compared.numbers;
      sum.different += compared.different;
    }
    if (wanted != nullptr)
      std::cout << options.tensor << " tensor ranks: " << sum.texts << " texts, " << sum.numbers
                << " numbers, " << sum.different << " different" << std::endl;
  }
}

TEST(BatchInvariant, RolloutsHaveTheTrainersLogProbabilitiesInEveryBit) {
  expect_equal_rollouts(models());
}

TEST(BatchInvariant, RolloutsOfModelsWithStatesHaveThemToo) {
  expect_equal_rollouts({{"mamba", mamba_model()}, {"delta nets", delta_net_model()}});
}

// What a training forward and its backward give, of one model with the same first values.
struct TrainedPass {
  at::Tensor losses;                  // [s, b]
  std::vector<at::Tensor> gradients;  // of their sum
  bool is_fused = false;  // the output layer has its gradient before the backward begins
};

TrainedPass trained_pass(const ModelConfig& config, const at::Tensor& tokens,
                         const at::Tensor& labels) {
  const ParallelGroups one;
  const std::unique_ptr<Model> model = Served::make(config, one);
  PlainParameterStore store(*model, at::kFloat, at::kCPU, /*gradients=*/true);
  initialize_parameters(*model, 5, one);
  const at::AutoGradMode grad_mode(true);
  RecomputeTape tape;
  ForwardContext context;
  context.training = true;
  context.tape = &tape;
  context.loss_grad = at::ones({});
  Batch batch;
  batch.set("tokens", tokens);
  batch.set("labels", labels);
  const auto with_mask = [&](const at::Tensor& mask) {
    batch.set("loss_mask", mask);
    return batch;
  };
  with_mask(at::ones(tokens.sizes(), at::kFloat));
  batch.place.position = at::arange(tokens.size(1), at::kLong);
  batch.place.sample = at::arange(tokens.size(0), at::kLong);
  context.place = batch.place;
  const StageTensors hidden = model->hidden(batch, {}, context);
  TrainedPass pass;
  pass.losses = at::empty({tokens.size(1), tokens.size(0)}, at::kFloat);
  for (int64_t i = 0; i < tokens.size(0); ++i)
    for (int64_t j = 0; j < tokens.size(1); ++j) {
      const at::Tensor mask = at::zeros(tokens.sizes(), at::kFloat);
      mask[i][j] = 1;
      pass.losses[j][i].copy_(model->loss(hidden, with_mask(mask), context).sum.detach());
    }
  store.zero_grad();
  const Loss loss = model->loss(hidden, with_mask(at::ones(tokens.sizes(), at::kFloat)), context);
  model->visit([&](const std::string& name, Parameter& parameter) {
    if (name.starts_with("output_layer.")) pass.is_fused = store.grad(parameter).any().item<bool>();
  });
  tape.backward(loss.sum);
  for (Parameter* parameter : model->parameters())
    pass.gradients.push_back(store.grad(*parameter).clone());
  return pass;
}

// Losses in parts of tokens, and activations that are computed again, have the bits of those that
// the rollouts are compared with.
TEST(BatchInvariant, FusedLossesAndRecomputedActivationsHaveTheBitsToo) {
  const BatchInvariantScope mode(true);
  ModelConfig config = models()[0].second;
  config.transformer.untie_embeddings_and_output_weights = true;
  const at::Tensor tokens = at::randint(kToyVocab, {3, 21}, at::kLong),
                   labels = at::randint(kToyVocab, {3, 21}, at::kLong);
  const ParallelGroups one;
  Served served(Served::make(config, one), {}, at::kFloat);
  const at::Tensor expected = losses_of(*served.model, tokens, labels, {});
  const TrainedPass plain = trained_pass(config, tokens, labels);
  EXPECT_TRUE(at::equal(plain.losses, expected));
  EXPECT_FALSE(plain.is_fused);

  const auto expect_same_gradients = [&](const TrainedPass& pass, const std::string& what) {
    ASSERT_EQ(pass.gradients.size(), plain.gradients.size());
    for (size_t i = 0; i < pass.gradients.size(); ++i)
      EXPECT_TRUE(at::equal(pass.gradients[i], plain.gradients[i])) << what << ", parameter " << i;
  };
  ModelConfig again = config;
  again.transformer.recompute_granularity = RecomputeGranularity::kFull;
  const TrainedPass layers = trained_pass(again, tokens, labels);
  EXPECT_TRUE(at::equal(layers.losses, expected));
  expect_same_gradients(layers, "whole layers");
  again.transformer.recompute_granularity = RecomputeGranularity::kSelective;
  again.transformer.recompute_modules = {"core_attn", "layernorm", "mlp_act"};
  const TrainedPass modules = trained_pass(again, tokens, labels);
  EXPECT_TRUE(at::equal(modules.losses, expected));
  expect_same_gradients(modules, "modules");

  for (ModelConfig fused : {config, again})
    for (const int64_t chunk : {0, 1, 10}) {
      fused.transformer.cross_entropy_fusion_impl = CrossEntropyFusion::kLinear;
      fused.transformer.cross_entropy_chunk_tokens = chunk;
      const TrainedPass pass = trained_pass(fused, tokens, labels);
      EXPECT_TRUE(at::equal(pass.losses, expected)) << chunk << " tokens at a time";
      EXPECT_TRUE(pass.is_fused);
    }
}

// The losses of texts that a training forward has packed are those of each alone.
TEST(BatchInvariant, PackedDocumentsHaveTheLossesOfEachAlone) {
  const BatchInvariantScope mode(true);
  const ParallelGroups one;
  for (const ModelConfig& config : {mamba_model(), delta_net_model()}) {
    Served trained(Served::make(config, one), {}, at::kFloat);
    std::mt19937 random(4);
    const std::vector<std::vector<int64_t>> lengths = {{7, 1, 20, 9}, {2, 22, 13}};
    const at::Tensor tokens = at::zeros({2, 37}, at::kLong), ids = at::zeros({2, 37}, at::kLong),
                     labels = at::randint(kToyVocab, {2, 37}, at::kLong);
    std::vector<at::Tensor> alone[2];
    for (int64_t i = 0; i < 2; ++i) {
      int64_t first = 0;
      for (const int64_t length : lengths[static_cast<size_t>(i)]) {
        const std::vector<int32_t> drawn = random_ids(random, length);
        for (int64_t j = 0; j < length; ++j) tokens[i][first + j] = drawn[static_cast<size_t>(j)];
        ids[i].narrow(0, first, length).fill_(first);
        alone[i].push_back(losses_of(*trained.model,
                                     tokens[i].narrow(0, first, length).unsqueeze(0),
                                     labels[i].narrow(0, first, length).unsqueeze(0), {}));
        first += length;
      }
    }
    const at::Tensor packed = losses_of(*trained.model, tokens, labels, ids);
    for (int64_t i = 0; i < 2; ++i)
      EXPECT_TRUE(at::equal(packed.select(1, i), at::cat(alone[i]).select(1, 0)));
  }
}

TEST(BatchInvariant, AdaptersOfLatentAttentionAreRefused) {
  for (const auto& [name, config] : models()) {
    TransformerConfig adapted = config.transformer;
    adapted.lora_rank = 4;
    const std::string error =
        error_of([&] { check_batch_invariant(adapted, at::kCPU, at::kFloat); });
    EXPECT_EQ(error.find("with adapters beside --multi-latent-attention is not built") !=
                  std::string::npos,
              name == "deepseek")
        << name << error;
  }
}

TEST(BatchInvariant, WhatGpusLackIsRefused) {
  const auto error = [](const TransformerConfig& model, at::ScalarType type, int64_t ranks) {
    return error_of([&] { check_batch_invariant(model, at::kCUDA, type, ranks); });
  };
  for (const auto& [name, config] : models()) {
    const std::string found = error(config.transformer, at::kBFloat16, 2);
    const char* missing = name == "mixtral"    ? "with experts is not built for GPUs"
                          : name == "deepseek" ? "with --multi-latent-attention is not built"
                                               : "";
    EXPECT_EQ(found.empty(), *missing == 0) << name << found;
    EXPECT_NE(found.find(missing), std::string::npos) << found;
  }
  const TransformerConfig llama = models()[0].second.transformer;
  EXPECT_NE(error(llama, at::kFloat, 1).find("computes in bf16 or fp16 on a GPU, not in Float"),
            std::string::npos);
  EXPECT_NE(error(llama, at::kHalf, 16).find("--tensor-model-parallel-size above 8"),
            std::string::npos);
  EXPECT_NE(error(mamba_model().transformer, at::kHalf, 1).find("with layers that have states"),
            std::string::npos);
}

TEST(BatchInvariant, Fp8IsServedByBlocksOnGpus) {
  TransformerConfig model = models()[0].second.transformer;
  model.fp8_format = Fp8Format::kE4M3;
  model.fp8_recipe = Fp8Recipe::kBlockwise;
  const auto error = [&](at::Device device, at::ScalarType type) {
    return error_of([&] { check_batch_invariant(model, device, type); });
  };
  EXPECT_EQ(error(at::kCUDA, at::kBFloat16), "");
  EXPECT_NE(error(at::kCPU, at::kFloat).find("with FP8 products is built for GPUs alone"),
            std::string::npos);
  for (const Fp8Recipe recipe : {Fp8Recipe::kTensorwise, Fp8Recipe::kDelayed}) {
    model.fp8_recipe = recipe;
    EXPECT_NE(error(at::kCUDA, at::kBFloat16).find("one FP8 scale for a whole tensor"),
              std::string::npos);
  }
}

// What the rollouts rule out.
TEST(BatchInvariant, WithoutTheModeSomeDiffer) {
  for (const ModelConfig& config : {models()[0].second, mamba_model()})
    EXPECT_GT(rollouts(config, {.schedules = 1}).different, 20);
}

}  // namespace
}  // namespace megatron
