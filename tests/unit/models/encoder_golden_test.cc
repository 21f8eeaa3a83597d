// BERT and T5 against Megatron-LM's BertModel and T5Model: losses, logits of both heads and every
// gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/format.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/model_table.h"
#include "megatron/models/t5/t5_model.h"
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
  TensorsByName grads, in, out;

  explicit EncoderGolden(const std::string& name) {
    const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/encoders/" + name +
                               ".safetensors");
    spec = nlohmann::json::parse(file.header().metadata.at("case"));
    for (const auto& [full, tensor] : read_golden_tensors(file)) {
      const size_t slash = full.find('/');
      const std::string kind = full.substr(0, slash), rest = full.substr(slash + 1);
      (kind == "grad" ? grads : kind == "in" ? in : out)[fused_name(rest)] = tensor;
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

// Weights that follow from names and places: formula() of make_model_goldens.py.
void set_weights(Module& model) {
  model.visit([](const std::string& name, Parameter& parameter) {
    uint32_t start = 2166136261U;  // FNV-1a
    for (const char c : name) start = (start ^ static_cast<uint8_t>(c)) * 16777619U;
    std::vector<int64_t> shape = parameter.global_shape;
    if (parameter.valid_rows >= 0) shape[0] = parameter.valid_rows;
    const at::Tensor values = at::empty(shape, at::kFloat);
    const bool norm = name.find("norm") != std::string::npos && name.ends_with("weight");
    for (int64_t i = 0; i < values.numel(); ++i) {
      uint32_t x = (static_cast<uint32_t>(i) + start) * 2654435761U;
      x = (x ^ (x >> 15)) * 2246822519U >> 16;
      const float value = static_cast<float>(x) / 65536 - 0.5F;
      values.data_ptr<float>()[i] =
          value * (shape.size() > 1 ? 0.75F : 0.25F) + (norm ? 1.0F : 0.0F);
    }
    parameter.value.zero_();
    parameter.value.narrow(0, 0, shape[0]).copy_(values);
  });
}

void expect_gradients(Module& model, const PlainParameterStore& store, const EncoderGolden& golden,
                      double rtol) {
  double all = 0;
  size_t compared = 0;
  for (const auto& [name, grad] : golden.grads) all += std::pow(grad.norm().item<double>(), 2);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const at::Tensor& expected = golden.grads.at(name);
    const at::Tensor& grad = store.grad(parameter);
    expect_close(grad.narrow(0, 0, expected.size(0)), expected, rtol, std::sqrt(all),
                 "gradient of " + name);
    const at::Tensor padded = grad.narrow(0, expected.size(0), grad.size(0) - expected.size(0));
    EXPECT_EQ(padded.abs().sum().item<double>(), 0.0) << "gradient of the padded rows of " << name;
    ++compared;
  });
  EXPECT_EQ(compared, golden.grads.size()) << "gradients of the golden that the model has not";
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
      BertModel model(config, groups, {0, config.transformer.num_layers, true, true}, {});
      PlainParameterStore store(model, dtype, at::kCPU, /*gradients=*/true);
      set_weights(model);
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

class T5Golden : public testing::TestWithParam<std::string> {};

TEST_P(T5Golden, LossesAndGradients) {
  const EncoderGolden golden(GetParam());
  T5Config own;
  own.encoder_num_layers = golden.spec["encoder_layers"];
  own.decoder_num_layers = golden.spec["decoder_layers"];
  own.decoder_seq_length = golden.spec["decoder_seq"];
  for (const bool recomputed : {false, true}) {
    ModelConfig config = golden.config("t5", own.encoder_num_layers + own.decoder_num_layers,
                                       golden.spec["encoder_seq"]);
    config.own = OwnConfig(own);
    if (recomputed) {
      config.transformer.recompute_granularity = RecomputeGranularity::kFull;
      config.transformer.recompute_method = RecomputeMethod::kUniform;
      config.transformer.recompute_num_layers = 1;
    }
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const ParallelGroups groups;
      T5Model model(config, groups, {0, config.transformer.num_layers, true, true}, {});
      PlainParameterStore store(model, dtype, at::kCPU, /*gradients=*/true);
      set_weights(model);
      Batch batch;
      for (const char* name : {"text_enc", "text_dec", "labels", "enc_mask", "dec_mask"})
        batch.set(name, golden.in.at(name).to(at::kLong));
      batch.set("loss_mask", golden.in.at("loss_mask").to(at::kFloat));
      ForwardContext context = context_for(batch["text_enc"], /*training=*/true);
      batch.place = context.place;
      RecomputeTape tape;
      context.tape = &tape;
      const StageTensors hidden = model.hidden(batch, {}, context);
      const Loss loss = model.loss(hidden, batch, context);
      EXPECT_EQ(loss.weight.item<double>(), batch["loss_mask"].sum().item<double>());
      expect_close((loss.sum / loss.weight).reshape({}), golden.out.at("lm_loss"), 1e-5, 0, "loss");
      {
        const at::NoGradGuard no_grad;
        expect_close(model.token_losses(hidden.front(), batch["labels"]).t() * batch["loss_mask"],
                     golden.out.at("token_loss"), 1e-5, 0, "losses of tokens");
      }
      tape.backward(BackwardRoot(loss.sum), {(1 / loss.weight).to(loss.sum)});
      expect_gradients(model, store, golden, 1e-5);
    }
  }
}

// The output of a model of which all but the bias of the first attention and the norms is 0:
// norm(dropout(bias)).
at::Tensor dropped_bias(Model& model, const char* layer, Batch& batch) {
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/false);
  model.visit([&](const std::string& name, Parameter& parameter) {
    const bool one = name.find("norm") != std::string::npos && name.ends_with("weight");
    parameter.value.fill_(one || name == cat(layer, ".self_attention.linear_proj.bias") ? 1.0
                                                                                        : 0.0);
  });
  ForwardContext context = context_for(batch.columns().front().second, /*training=*/true);
  batch.place = context.place;
  const at::NoGradGuard no_grad;
  return model.hidden(batch, {}, context).front();
}

// BERT draws as T5's encoder does.
TEST(T5Dropout, LayersOfEqualNumberDropOtherElements) {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.hidden_size = 16;
  t.num_attention_heads = 2;
  t.seq_length = 8;
  t.hidden_dropout = 0.5;
  config.vocab_size = config.padded_vocab_size = 8;
  const ParallelGroups groups;
  const at::Tensor ids = at::zeros({2, 8}, at::kLong), ones = at::ones({2, 8}, at::kLong);
  Batch batch;
  for (const char* name : {"text", "text_enc", "text_dec"}) batch.set(name, ids);
  for (const char* name : {"padding_mask", "enc_mask", "dec_mask"}) batch.set(name, ones);

  config.type = "bert";
  config.own = OwnConfig(BertConfig());
  config.own.as<BertConfig>()->bert_binary_head = false;
  t.num_layers = 1;
  t.finalize();
  const at::Tensor encoder = dropped_bias(*make_model(config, groups), "encoder.layers.0", batch);

  config.type = "t5";
  T5Config own;
  own.encoder_num_layers = own.decoder_num_layers = 1;
  own.decoder_seq_length = 8;
  config.own = OwnConfig(own);
  t.num_layers = 2;
  const at::Tensor decoder = dropped_bias(*make_model(config, groups), "decoder.layers.0", batch);
  EXPECT_GT(encoder.abs().min().item<float>(), 0.0F);
  // Half of the elements are dropped in either, so half of them differ.
  EXPECT_NEAR((encoder.sign() != decoder.sign()).to(at::kFloat).mean().item<float>(), 0.5F, 0.15F);
}

INSTANTIATE_TEST_SUITE_P(Megatron, T5Golden, testing::Values("t5_learned", "t5_rope"));
INSTANTIATE_TEST_SUITE_P(Megatron, BertGolden, testing::Values("bert_sop", "bert_untied"));

}  // namespace
}  // namespace megatron
