// Properties of the GPT model: recomputation, dropout by place, initialisation, padding, errors.
#include "megatron/models/gpt/gpt_model.h"

#include <gtest/gtest.h>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

ModelConfig small_config() {
  ModelConfig config = read_golden("llama").config;
  config.transformer.num_layers = 3;
  config.transformer.hidden_dropout = 0.1;
  return config;
}

struct PassResult {
  double loss;
  std::vector<at::Tensor> grads;
};

// One pass over micro-batches of `micro` samples of the same 4 samples.
PassResult run(const ModelConfig& config, int64_t micro = 4) {
  const ParallelGroups groups;
  GPTModel model(config, groups);
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/true);
  initialize_parameters(model, config.transformer.seed, groups);
  const at::Tensor text =
      at::arange(4 * 13, at::kLong).view({4, 13}).mul(7).remainder(config.vocab_size);
  PassResult result{0.0, {}};
  for (int64_t first = 0; first < 4; first += micro) {
    const at::Tensor rows = text.narrow(0, first, micro);
    const at::Tensor tokens = rows.slice(1, 0, -1).contiguous(),
                     labels = rows.slice(1, 1).contiguous();
    ForwardContext context = context_for(tokens, /*training=*/true, 100 + first);
    RecomputeTape tape;
    context.tape = &tape;
    const Loss loss = model.loss(tokens, labels, at::ones({micro, 12}), context);
    tape.backward(loss.sum);
    result.loss += loss.sum.item<double>();
  }
  model.visit([&](const std::string&, Parameter& parameter) {
    result.grads.push_back(store.grad(parameter));
  });
  return result;
}

void expect_identical(const PassResult& a, const PassResult& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.grads.size(), b.grads.size());
  for (size_t i = 0; i < a.grads.size(); ++i) EXPECT_TRUE(at::equal(a.grads[i], b.grads[i])) << i;
}

TEST(GPTModel, FullRecomputationHasIdenticalGradients) {
  ModelConfig config = small_config();
  const PassResult plain = run(config);
  config.transformer.recompute_granularity = RecomputeGranularity::kFull;
  for (const auto method : {RecomputeMethod::kUniform, RecomputeMethod::kBlock}) {
    for (const int64_t layers : {1, 2, 3}) {
      config.transformer.recompute_method = method;
      config.transformer.recompute_num_layers = layers;
      expect_identical(plain, run(config));
    }
  }
}

TEST(GPTModel, SelectiveRecomputationHasIdenticalGradients) {
  ModelConfig config = small_config();
  const PassResult plain = run(config);
  config.transformer.recompute_granularity = RecomputeGranularity::kSelective;
  config.transformer.recompute_modules = {"core_attn", "layernorm"};
  expect_identical(plain, run(config));
}

TEST(GPTModel, DropoutDoesNotDependOnTheMicroBatch) {
  const PassResult whole = run(small_config());
  const PassResult split = run(small_config(), 1);
  EXPECT_NEAR(whole.loss, split.loss, 1e-5 * whole.loss);
  for (size_t i = 0; i < whole.grads.size(); ++i)
    expect_close(split.grads[i], whole.grads[i], 1e-5, 100.0, std::to_string(i));
  ModelConfig without = small_config();
  without.transformer.hidden_dropout = 0.0;
  EXPECT_GT(std::abs(run(without).loss - whole.loss), 1e-3) << "dropout had no effect";
}

TEST(GPTModel, InitialisationFollowsTheLaws) {
  ModelConfig config = small_config();
  config.transformer.hidden_size = 64;
  config.transformer.ffn_hidden_size = 256;
  const ParallelGroups groups;
  GPTModel model(config, groups);
  PlainParameterStore store(model, at::kFloat, at::kCPU, false);
  initialize_parameters(model, 1234, groups);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& w = parameter.value;
    if (parameter.role == ParameterRole::kNorm) {
      EXPECT_TRUE(at::equal(w, at::ones_like(w))) << name;
      return;
    }
    const bool output = name.ends_with("linear_proj.weight") || name.ends_with("linear_fc2.weight");
    const double std = output ? 0.02 / std::sqrt(6.0) : 0.02;
    const at::Tensor valid = parameter.valid_rows >= 0 ? w.narrow(0, 0, parameter.valid_rows) : w;
    EXPECT_NEAR(valid.std().item<double>(), std, 0.06 * std) << name;
    EXPECT_NEAR(valid.mean().item<double>(), 0.0, 0.1 * std) << name;
    if (parameter.valid_rows >= 0) {
      EXPECT_EQ(w.slice(0, parameter.valid_rows).abs().sum().item<double>(), 0.0) << name;
    }
  });
}

TEST(GPTModel, PaddingOfTheVocabularyDoesNotChangeTheLoss) {
  ModelConfig config = small_config();
  const double loss = run(config).loss;
  config.padded_vocab_size = 128;
  EXPECT_NEAR(run(config).loss, loss, 1e-6 * loss);
}

TEST(GPTModel, ParameterNamesAreTheContract) {
  const ParallelGroups groups;
  GPTModel model(read_golden("gpt2").config, groups);
  std::vector<std::string> names;
  model.visit([&](const std::string& name, Parameter&) { names.push_back(name); });
  ASSERT_EQ(names.size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(names[0], "embedding.word_embeddings.weight");
  EXPECT_EQ(names[1], "embedding.position_embeddings.weight");
  EXPECT_EQ(names[2], "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(names[5], "decoder.layers.0.self_attention.linear_qkv.bias");
  EXPECT_EQ(names[13], "decoder.layers.0.mlp.linear_fc2.bias");
  EXPECT_EQ(names.back(), "decoder.final_layernorm.bias");
}

TEST(GPTModel, RefusesAVocabularyThatDoesNotFit) {
  ModelConfig config = small_config();
  config.padded_vocab_size = config.vocab_size - 1;
  const ParallelGroups groups;
  EXPECT_THROW(GPTModel(config, groups), Error);
}

}  // namespace
}  // namespace megatron
