// BERT against Megatron-LM's BertModel: losses, logits of both heads and every gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/gpt_golden.h"

namespace megatron {
namespace {

using TensorsByName = std::map<std::string, at::Tensor>;

// Megatron's local layers have their norms apart, ours are part of the linears behind them.
std::string fused_name(std::string name) {
  name = replaced(name, ".input_layernorm.", ".self_attention.linear_qkv.layer_norm_");
  return replaced(name, ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_");
}

struct EncoderGolden {
  nlohmann::json spec;
  TensorsByName weights, grads, in, out;

  explicit EncoderGolden(const std::string& name) {
    const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/encoders/" + name +
                               ".safetensors");
    spec = nlohmann::json::parse(file.header().metadata.at("case"));
    for (const auto& [full, tensor] : read_golden_tensors(file)) {
      const size_t slash = full.find('/');
      const std::string kind = full.substr(0, slash), rest = full.substr(slash + 1);
      (kind == "weight" ? weights
       : kind == "grad" ? grads
       : kind == "in"   ? in
                        : out)[fused_name(rest)] = tensor;
    }
  }

  ModelConfig config(const char* type, int64_t layers, int64_t seq_length) const {
    ModelConfig config;
    config.type = type;
    TransformerConfig& t = config.transformer;
    t.num_layers = layers;
    t.hidden_size = spec["hidden"];
    t.num_attention_heads = spec["heads"];
    t.ffn_hidden_size = spec["ffn"];
    t.kv_channels = spec.value("kv_channels", int64_t{0});
    t.seq_length = seq_length;
    t.max_position_embeddings = spec["positions"];
    t.position_embedding_type =
        spec["position"] == "rope" ? PositionEmbedding::kRope : PositionEmbedding::kLearnedAbsolute;
    t.untie_embeddings_and_output_weights = !spec["tied"].get<bool>();
    t.hidden_dropout = t.attention_dropout = 0;
    t.finalize();
    config.vocab_size = spec["vocab"];
    config.padded_vocab_size = config.vocab_size + 3;
    return config;
  }
};

void set_weights(Module& model, const EncoderGolden& golden) {
  size_t used = 0;
  model.visit([&](const std::string& name, Parameter& parameter) {
    const auto found = golden.weights.find(name);
    ASSERT_NE(found, golden.weights.end()) << name;
    parameter.value.zero_();
    parameter.value.narrow(0, 0, found->second.size(0)).copy_(found->second);
    ++used;
  });
  EXPECT_EQ(used, golden.weights.size()) << "weights of the golden that the model does not have";
}

void expect_gradients(Module& model, const PlainParameterStore& store, const EncoderGolden& golden,
                      double rtol) {
  double all = 0;
  for (const auto& [name, grad] : golden.grads) all += std::pow(grad.norm().item<double>(), 2);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = golden.grads.at(name);
    const at::Tensor& grad = store.grad(parameter);
    expect_close(grad.narrow(0, 0, expected.size(0)), expected, rtol, std::sqrt(all),
                 "gradient of " + name);
    const at::Tensor padded = grad.narrow(0, expected.size(0), grad.size(0) - expected.size(0));
    EXPECT_EQ(padded.abs().sum().item<double>(), 0.0) << "gradient of the padded rows of " << name;
  });
}

class BertGolden : public testing::TestWithParam<std::string> {};

TEST_P(BertGolden, LossesLogitsAndGradients) {
  const EncoderGolden golden(GetParam());
  const bool binary = golden.spec["binary_head"];
  ModelConfig config = golden.config("bert", golden.spec["layers"], golden.spec["seq"]);
  config.own = OwnConfig(BertConfig());
  config.own.as<BertConfig>()->bert_binary_head = binary;
  // Also with the masked positions alone.
  const int64_t masked = golden.in.at("loss_mask").sum(1).max().item<int64_t>();
  for (const auto& [dtype, rtol] : {std::pair{at::kFloat, 1e-5}, {at::kDouble, 1e-5}}) {
    for (const int64_t most : {int64_t{0}, masked}) {
      const ParallelGroups groups;
      BertModel model(config, groups, {0, config.transformer.num_layers, true, true}, nullptr);
      PlainParameterStore store(model, dtype, at::kCPU, /*gradients=*/true);
      set_weights(model, golden);
      Batch batch;
      for (const char* name : {"types", "labels", "padding_mask"})
        batch.set(name, golden.in.at(name).to(at::kLong));
      batch.set("text", golden.in.at("tokens").to(at::kLong));
      batch.set("loss_mask", golden.in.at("loss_mask").to(at::kFloat));
      batch.set("is_random", golden.in.at("is_random").to(at::kLong).unsqueeze(1));
      const int64_t b = batch["text"].size(0);
      batch.set("sample_weight", at::ones({b, 1}));
      batch.most_counted = most;
      ForwardContext context = context_for(batch["text"], /*training=*/true);
      batch.place = context.place;
      const at::Tensor weight = batch["loss_mask"].sum();
      RecomputeTape tape;
      const at::Tensor totals = at::zeros({1, 2}, at::kDouble);
      AuxiliaryLosses losses({.names = model.auxiliary_losses(),
                              .totals = totals,
                              .gradient = [](const at::Tensor& sum, const at::Tensor& own, LossRows,
                                             std::string_view) { return (1 / own).to(sum); }},
                             tape);
      context.tape = &tape;
      if (binary) context.auxiliary_losses = &losses;
      const StageTensors hidden = model.hidden(batch, {}, context);
      const Loss loss = model.loss(hidden, batch, context);
      EXPECT_EQ(loss.weight.item<double>(), weight.item<double>());
      expect_close((loss.sum / loss.weight).reshape({}), golden.out.at("lm_loss"), rtol, 0, "loss");
      {
        const at::NoGradGuard no_grad;
        const at::Tensor token_losses =
            model.token_losses(hidden.front(), batch["labels"]).t() * batch["loss_mask"];
        expect_close(token_losses, golden.out.at("token_loss"), rtol, 0, "losses of tokens");
        if (binary)
          expect_close(model.order_logits(hidden.front()), golden.out.at("binary_logits"), rtol, 0,
                       "logits of the order");
      }
      if (binary) {
        EXPECT_NEAR(totals[0][0].item<double>() / totals[0][1].item<double>(),
                    golden.out.at("sop_loss").item<double>(), 1e-5);
      }
      tape.backward(BackwardRoot(loss.sum), {(1 / weight).to(loss.sum)});
      expect_gradients(model, store, golden, rtol);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Megatron, BertGolden, testing::Values("bert_sop", "bert_untied"));

}  // namespace
}  // namespace megatron
