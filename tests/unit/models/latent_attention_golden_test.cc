// Multi-latent attention against DeepSeek's layers in Hugging Face transformers: outputs and every
// gradient (tests/golden/latent_attention/make_goldens.py).
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <nlohmann/json.hpp>

#include "megatron/nn/parameter_store.h"
#include "megatron/transformer/attention/multi_latent_attention.h"
#include "megatron/transformer/attention/rotary_embedding.h"
#include "tests/unit/golden_tensors.h"

namespace megatron {
namespace {

constexpr int64_t kTokens = 12, kSamples = 2;

TransformerConfig latent_golden_config(const nlohmann::json& c) {
  TransformerConfig t;
  t.num_layers = 1;
  t.seq_length = kTokens;
  t.hidden_size = c["hidden_size"];
  t.num_attention_heads = c["num_attention_heads"];
  t.multi_latent_attention = t.qk_layernorm = true;
  if (c["q_lora_rank"] > 0) t.q_lora_rank = c["q_lora_rank"].get<int64_t>();
  t.kv_lora_rank = c["kv_lora_rank"];
  t.qk_head_dim = c["qk_nope_head_dim"];
  t.qk_pos_emb_head_dim = c["qk_rope_head_dim"];
  t.v_head_dim = c["v_head_dim"];
  t.rotary_scaling_factor = c["rotary_scaling_factor"];
  t.mscale = c["mscale"];
  t.mscale_all_dim = c["mscale_all_dim"];
  t.rope_original_max_position_embeddings = 16;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.norm_placement = NormPlacement::kPost;  // the layer's norm is not part of the golden
  t.layernorm_epsilon = 1e-3;
  t.latent_norm_epsilon = 1e-6;
  t.add_bias_linear = false;
  t.attention_dropout = t.hidden_dropout = 0.0;
  t.finalize();
  return t;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b).abs().max().item<double>() / b.abs().max().item<double>();
}

void compare_with_golden(const std::string& name, at::ScalarType type, double tolerance) {
  SCOPED_TRACE(cat(name, " ", c10::toString(type)));
  const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/latent_attention/" + name +
                             ".safetensors");
  const std::map<std::string, at::Tensor> golden = read_golden_tensors(file);
  const TransformerConfig config =
      latent_golden_config(nlohmann::json::parse(file.header().metadata.at("config")));
  const ParallelGroups one;
  MultiLatentAttention layer(config, 1, false, one);
  PlainParameterStore store(layer, type, at::kCPU, true);
  size_t weights = 0;
  layer.visit([&](const std::string& parameter, Parameter& p) {
    p.value.copy_(golden.at(parameter));
    ++weights;
  });
  EXPECT_EQ(golden.size(), 4 + 2 * weights) << "the golden has weights that the layer has not";

  ForwardContext pass;
  pass.place.position = at::arange(kTokens, at::kLong);
  pass.place.sample = at::arange(kSamples, at::kLong);
  const LayerContext context{pass, RotaryEmbedding(config).tables(pass.place.position, type)};
  const auto rows = [&](const char* key) {
    return golden.at(key).transpose(0, 1).to(type).contiguous();
  };
  const at::Tensor x = rows("x").set_requires_grad(true);
  const at::Tensor y = layer.forward(x, context, /*add=*/false).output;
  torch::autograd::backward({y}, {rows("dy")});
  EXPECT_LT(distance(y.detach().transpose(0, 1), golden.at("y")), tolerance);
  EXPECT_LT(distance(x.grad().transpose(0, 1), golden.at("dx")), tolerance);
  layer.visit([&](const std::string& parameter, Parameter& p) {
    EXPECT_LT(distance(store.grad(p), golden.at("grad." + parameter)), tolerance) << parameter;
  });
}

TEST(LatentAttentionGolden, EqualsDeepSeekInTransformers) {
  for (const char* name : {"v2", "v3", "v3_plain"}) {
    compare_with_golden(name, at::kDouble, 1e-10);
    compare_with_golden(name, at::kFloat, 1e-5);
  }
}

}  // namespace
}  // namespace megatron
