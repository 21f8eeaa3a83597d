// Layers of experts against the blocks of Mixtral, Qwen2-MoE and DeepSeek-V3 in Hugging Face
// transformers: outputs and every gradient (tests/golden/moe/make_layer_goldens.py).
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <nlohmann/json.hpp>

#include "megatron/nn/parameter_store.h"
#include "megatron/transformer/moe/moe_layer.h"
#include "tests/unit/golden_tensors.h"

namespace megatron {
namespace {

TransformerConfig expert_golden_config(const std::string& name, const nlohmann::json& sizes,
                                       int64_t hidden_size) {
  TransformerConfig t;
  t.num_layers = 1;
  t.hidden_size = hidden_size;
  t.num_attention_heads = 1;
  t.seq_length = 16;
  t.swiglu = true;
  t.add_bias_linear = false;
  t.attention_dropout = t.hidden_dropout = 0.0;
  t.normalization = Normalization::kRMSNorm;
  t.norm_placement = NormPlacement::kPost;  // the layer's norm is not part of the golden
  t.moe_router_topk = sizes["num_experts_per_tok"];
  if (name == "mixtral") {
    t.num_experts = sizes["num_local_experts"];
    t.moe_ffn_hidden_size = sizes["intermediate_size"].get<int64_t>();
  } else {
    t.moe_ffn_hidden_size = sizes["moe_intermediate_size"].get<int64_t>();
  }
  if (name == "qwen2_moe") {
    t.num_experts = sizes["num_experts"];
    t.moe_router_pre_softmax = true;  // norm_topk_prob: false
    t.moe_shared_expert_intermediate_size = sizes["shared_expert_intermediate_size"].get<int64_t>();
    t.moe_shared_expert_gate = true;
  }
  if (name == "deepseek_v3") {
    t.num_experts = sizes["n_routed_experts"];
    t.moe_router_score_function = RouterScore::kSigmoid;
    t.moe_router_enable_expert_bias = true;
    t.moe_router_num_groups = sizes["n_group"].get<int64_t>();
    t.moe_router_group_topk = sizes["topk_group"].get<int64_t>();
    t.moe_router_topk_scaling_factor = sizes["routed_scaling_factor"].get<double>();
    t.moe_shared_expert_intermediate_size =
        sizes["n_shared_experts"].get<int64_t>() * *t.moe_ffn_hidden_size;
  }
  t.finalize();
  return t;
}

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b).abs().max().item<double>() / b.abs().max().item<double>();
}

void compare_layer_with_golden(const std::string& name, at::ScalarType type, double tolerance) {
  SCOPED_TRACE(cat(name, " ", c10::toString(type)));
  const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/moe/" + name + ".safetensors");
  const std::map<std::string, at::Tensor> golden = read_golden_tensors(file);
  const TransformerConfig config = expert_golden_config(
      name, nlohmann::json::parse(file.header().metadata.at("config")), golden.at("x").size(2));
  const ParallelGroups one;
  MoELayer layer(config, 1, false, one);
  PlainParameterStore store(layer, type, at::kCPU, true);
  size_t weights = 0, states = 0;
  layer.visit([&](const std::string& parameter, Parameter& p) {
    p.value.copy_(golden.at(parameter));
    ++weights;
  });
  layer.visit_state([&](const std::string& state, at::Tensor& value) {
    value = golden.at(state).to(at::kFloat);
    ++states;
  });
  EXPECT_EQ(golden.size(), 4 + 2 * weights + states) << "the golden has what the layer has not";

  const ForwardContext pass;
  const LayerContext context{pass, {}};
  const auto rows = [&](const char* key) {
    return golden.at(key).transpose(0, 1).to(type).contiguous();
  };
  const at::Tensor x = rows("x").set_requires_grad(true);
  const at::Tensor y = layer.forward(x, context, /*add=*/false).output;
  torch::autograd::backward({y}, {rows("dy")});
  EXPECT_LT(relative_distance(y.detach().transpose(0, 1), golden.at("y")), tolerance);
  EXPECT_LT(relative_distance(x.grad().transpose(0, 1), golden.at("dx")), tolerance);
  layer.visit([&](const std::string& parameter, Parameter& p) {
    EXPECT_LT(relative_distance(store.grad(p), golden.at("grad." + parameter)), tolerance)
        << parameter;
  });
}

TEST(MoELayerGolden, EqualsTheBlocksOfTransformers) {
  for (const char* name : {"mixtral", "qwen2_moe", "deepseek_v3"}) {
    compare_layer_with_golden(name, at::kDouble, 1e-10);
    compare_layer_with_golden(name, at::kFloat, 1e-5);
  }
}

}  // namespace
}  // namespace megatron
