#include "tests/unit/models/gpt_golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/auxiliary_losses.h"
#include "tests/unit/golden_tensors.h"

namespace megatron {
namespace {

ModelConfig config_from(const nlohmann::json& c) {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = c["num_layers"];
  t.hidden_size = c["hidden_size"];
  t.ffn_hidden_size = c["ffn_hidden_size"];
  t.num_attention_heads = c["num_attention_heads"];
  t.num_query_groups = c["num_query_groups"];
  t.group_query_attention = t.num_query_groups != t.num_attention_heads;
  t.kv_channels = c["kv_channels"];
  t.seq_length = t.max_position_embeddings = c["seq_length"];
  const std::string position = c["position"], activation = c["activation"];
  t.position_embedding_type = position == "rope"   ? PositionEmbedding::kRope
                              : position == "none" ? PositionEmbedding::kNone
                                                   : PositionEmbedding::kLearnedAbsolute;
  t.normalization = c["norm"] == "RMSNorm" ? Normalization::kRMSNorm : Normalization::kLayerNorm;
  t.layernorm_epsilon = c["eps"];
  t.add_bias_linear = c["bias"];
  t.add_qkv_bias = c["qkv_bias"];
  t.swiglu = activation == "swiglu";
  t.geglu = activation == "geglu";
  t.quick_geglu = activation == "quick_geglu";
  t.squared_relu = activation == "squared_relu";
  t.bias_gelu_fusion = activation == "gelu_tanh";
  t.glu_linear_offset = c["offset"];
  t.untie_embeddings_and_output_weights = !c["tied"].get<bool>();
  if (const int64_t window = c["window"]; window > 0) t.window_size = {window, 0};
  t.qk_layernorm = c["qk_norm"];
  t.layernorm_zero_centered_gamma = c["zero_centered"];
  t.rotary_base = c["rotary_base"];
  t.rotary_percent = c["rotary_percent"];
  t.rotary_interleaved = c["interleaved"];
  if (const int64_t factor = c["interpolation"]; factor > 0)
    t.rotary_seq_len_interpolation_factor = factor;
  if (const double factor = c["rope_scaling"]; factor > 0) {
    t.use_rope_scaling = true;
    t.rope_scaling_factor = factor;
  }
  t.z_loss_coeff = c["z_loss"];
  t.mtp_num_layers = c.value("mtp_num_layers", 0);
  t.mtp_use_repeated_layer = c.value("mtp_use_repeated_layer", false);
  t.mtp_loss_scaling_factor = c.value("mtp_loss_scaling_factor", t.mtp_loss_scaling_factor);
  t.hidden_dropout = t.attention_dropout = 0.0;
  t.finalize();
  config.vocab_size = c["vocab_size"];
  config.padded_vocab_size = c["padded_vocab_size"];
  return config;
}

}  // namespace

Golden read_golden(const std::string& name, const std::string& folder) {
  const SafetensorsFile file(folder + "/" + name + ".safetensors");
  Golden golden;
  golden.config = config_from(nlohmann::json::parse(file.header().metadata.at("config")));
  golden.tensors = read_golden_tensors(file);
  return golden;
}

void load_weights(Module& model, const Golden& golden, const std::string& prefix) {
  size_t used = 0;
  model.visit([&](const std::string& name, Parameter& parameter) {
    const auto found = golden.tensors.find(prefix + name);
    ASSERT_NE(found, golden.tensors.end()) << name;
    const at::Tensor& stored = found->second;
    parameter.value.zero_();
    parameter.value.narrow(0, 0, stored.size(0)).copy_(stored);
    ++used;
  });
  size_t stored = 0;
  for (const auto& [name, tensor] : golden.tensors) stored += name.rfind(prefix, 0) == 0;
  EXPECT_EQ(used, stored) << "weights of the golden that the model does not have";
}

ForwardContext context_for(const at::Tensor& tokens, bool training, int64_t first_sample) {
  ForwardContext context;
  context.training = training;
  context.place.sample = at::arange(first_sample, first_sample + tokens.size(0), at::kLong);
  context.place.position = at::arange(tokens.size(1), at::kLong);
  return context;
}

double mtp_loss(Model& model, const at::Tensor& tokens) {
  const at::NoGradGuard no_grad;
  RecomputeTape tape;
  const std::vector<std::string> names = model.auxiliary_losses();
  const at::Tensor totals = at::zeros({static_cast<int64_t>(names.size()), 2}, at::kDouble);
  AuxiliaryLosses losses({.names = names,
                          .totals = totals,
                          .gradient = [](const at::Tensor& sum, const at::Tensor&, LossRows,
                                         std::string_view) { return at::ones_like(sum); }},
                         tape);
  Batch batch;
  batch.set("tokens", tokens.slice(1, 0, -1).contiguous());
  batch.set("labels", tokens.slice(1, 1).contiguous());
  batch.set("loss_mask", at::ones({1, tokens.size(1) - 1}));
  ForwardContext context = context_for(batch["tokens"], /*training=*/true);
  context.tape = &tape;
  context.auxiliary_losses = &losses;
  batch.place = context.place;
  model.loss(model.hidden(batch, {}, context), batch, context);
  const auto mtp = std::find(names.begin(), names.end(), "mtp_1 loss");
  MEGATRON_ASSERT(mtp != names.end());
  const at::Tensor sum = totals[mtp - names.begin()];
  return (sum[0] / sum[1]).item<double>();
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double rtol,
                  double norm_of_all, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const at::Tensor a = actual.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  const double difference = (a - b).norm().item<double>();
  EXPECT_LE(difference, rtol * b.norm().item<double>() + 1e-3 * rtol * norm_of_all) << what;
}

}  // namespace megatron
