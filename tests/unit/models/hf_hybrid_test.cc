// config.json of models with states: limits of time steps, patterns, multipliers, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "megatron/base/files.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "tests/unit/error_of.h"
#include "tests/unit/models/hf_golden.h"

namespace megatron {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

ordered_json golden_config(const std::string& name) {
  return ordered_json::parse(read_file(hf_golden_folder(name) + "/config.json"));
}

TransformerConfig parsed(const ordered_json& json) {
  return parse_hf_config(json.dump(2), "config.json").config.transformer;
}

TEST(HfHybrid, LimitsOfTimeSteps) {
  ordered_json json = golden_config("mamba2");
  EXPECT_TRUE(parsed(json).mamba_dt_limit.empty());
  json["time_step_limit"] = {0.001, 0.1};
  EXPECT_EQ(parsed(json).mamba_dt_limit, (std::vector<std::string>{"0.001", "0.1"}));
  // As transformers 4 wrote it, which is not JSON
  std::string text = json.dump(2);
  text.replace(text.find("0.1\n", text.find("time_step_limit")), 3, "Infinity");
  const HfModel model = parse_hf_config(text, "config.json");
  EXPECT_EQ(model.config.transformer.mamba_dt_limit, (std::vector<std::string>{"0.001", "inf"}));
  const ordered_json written =
      ordered_json::parse(write_hf_config(*model.family, model.config, "{}"));
  EXPECT_EQ(written["time_step_limit"],
            ordered_json::parse(R"([0.001, {"__float__": "Infinity"}])"));
}

TEST(HfHybrid, Patterns) {
  ordered_json json = golden_config("nemotron_h");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "M-M*M-");
  json.erase("layers_block_type");
  json["hybrid_override_pattern"] = "M-M*";
  json["num_hidden_layers"] = 4;
  const HfModel model = parse_hf_config(json.dump(), "config.json");
  EXPECT_EQ(model.config.transformer.hybrid_layer_pattern, "M-M*");
  const ordered_json written =
      ordered_json::parse(write_hf_config(*model.family, model.config, json.dump()));
  EXPECT_EQ(
      written["layers_block_type"],
      ordered_json::parse(R"(["linear_attention", "mlp", "linear_attention", "full_attention"])"));
  EXPECT_FALSE(written.contains("hybrid_override_pattern"));
}

TEST(HfHybrid, LayersOfAMixerAndAnMlp) {
  ordered_json json = golden_config("bamba");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "M-*-M-");
  EXPECT_EQ(parsed(json).mamba_head_dim, 4) << "auto: 2 * 16 channels of 8 heads";
  EXPECT_DOUBLE_EQ(parsed(json).rotary_percent, 0.5);
  json["attn_layer_indices"] = nullptr;
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "M-M-M-");
  EXPECT_EQ(parsed(json).position_embedding_type, PositionEmbedding::kNone);

  json = golden_config("qwen3_5_text");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "G-G-*-G-");
  json.erase("layer_types");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "G-G-G-*-");
  json["full_attention_interval"] = 2;
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "G-*-G-*-");

  json = golden_config("granitemoehybrid");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "M-*-M-");
  json.erase("layer_types");
  EXPECT_EQ(parsed(json).hybrid_layer_pattern, "M-M-M-");
}

// Members of rotary positions that place pictures stay in the file.
TEST(HfHybrid, PositionsOfPicturesAreKept) {
  ordered_json json = golden_config("qwen3_5_text");
  json["rope_parameters"]["mrope_section"] = {1, 0, 0};
  json["rope_parameters"]["mrope_interleaved"] = true;
  const HfModel model = parse_hf_config(json.dump(), "config.json");
  const ordered_json written =
      ordered_json::parse(write_hf_config(*model.family, model.config, json.dump()));
  for (const auto& [key, value] : json["rope_parameters"].items())
    EXPECT_EQ(written["rope_parameters"][key], value) << key;
}

TEST(HfHybrid, Multipliers) {
  ordered_json json = golden_config("granitemoehybrid");
  // Also scales whose square and its root are rounded
  for (const double scale : {0.0078125, 0.3, 0.015625, 0.22, 0.0883883476483184, 1.0, 3.7}) {
    json["attention_multiplier"] = scale;
    const HfModel model = parse_hf_config(json.dump(), "config.json");
    EXPECT_DOUBLE_EQ(model.config.transformer.softmax_scale(), scale);
    const ordered_json written =
        ordered_json::parse(write_hf_config(*model.family, model.config, json.dump()));
    EXPECT_EQ(written["attention_multiplier"].get<double>(), scale);
    for (const char* key : {"embedding_multiplier", "residual_multiplier", "logits_scaling"})
      EXPECT_EQ(written[key], json[key]) << key;
    EXPECT_EQ(written["position_embedding_type"], "nope") << "what means nothing to us stays";
  }
  // A scale that no file gave
  HfModel model = parse_hf_config(json.dump(), "config.json");
  model.config.transformer.query_pre_attn_scalar.reset();
  const ordered_json written =
      ordered_json::parse(write_hf_config(*model.family, model.config, json.dump()));
  EXPECT_DOUBLE_EQ(written["attention_multiplier"].get<double>(), 0.5) << "heads of 4";
}

// The segments of a pipeline are no part of the architecture.
TEST(HfHybrid, SegmentsAreNotWritten) {
  for (const char* name : {"nemotron_h", "bamba", "qwen3_5_text"}) {
    HfModel model = parse_hf_config(golden_config(name).dump(), "config.json");
    const std::string plain = model.config.transformer.hybrid_layer_pattern;
    model.config.transformer.hybrid_layer_pattern = plain.substr(0, 3) + "|" + plain.substr(3);
    const std::string written = write_hf_config(*model.family, model.config, "{}");
    EXPECT_EQ(parsed(ordered_json::parse(written)).hybrid_layer_pattern, plain);
  }
}

TEST(HfHybrid, LayersThatAFamilyHasNot) {
  const auto error = [](const char* family, const char* pattern) {
    ModelConfig config = parse_hf_config(golden_config(family).dump(), "config.json").config;
    config.transformer.hybrid_layer_pattern = pattern;
    config.transformer.num_layers = std::ssize(std::string(pattern));
    return error_of([&] { write_hf_config(*find_hf_family(family), config, "{}"); });
  };
  EXPECT_EQ(
      error("bamba", "M-*M-"),
      "layers of a bamba model of Hugging Face are M- and *-, this model has the layers M-*M-");
  EXPECT_EQ(
      error("qwen3_5_text", "G-M-"),
      "layers of a qwen3_5_text model of Hugging Face are G- and *-, this model has the layers "
      "G-M-");
  EXPECT_EQ(error("granitemoehybrid", ""),
            "layers of a granitemoehybrid model of Hugging Face are M- and *-, this model has the "
            "layers *-");
}

TEST(HfHybrid, WhatIsNotBuiltIsNamed) {
  const auto error = [](const char* name, const std::function<void(ordered_json&)>& edit) {
    ordered_json json = golden_config(name);
    edit(json);
    return error_of([&] { parsed(json); });
  };
  EXPECT_THAT(error("mamba2", [](ordered_json& json) { json["use_bias"] = true; }),
              HasSubstr("use_bias"));
  EXPECT_THAT(error("mamba2", [](ordered_json& json) { json["conv_kernel"] = 3; }),
              HasSubstr("conv_kernel"));
  EXPECT_THAT(error("mamba2", [](ordered_json& json) { json["n_groups"] = 3; }),
              HasSubstr("not divisible by --mamba-num-groups 3"));
  EXPECT_THAT(error("mamba2", [](ordered_json& json) { json["time_step_limit"] = {1}; }),
              HasSubstr("time_step_limit"));
  EXPECT_THAT(error("nemotron_h", [](ordered_json& json) { json["mamba_hidden_act"] = "gelu"; }),
              HasSubstr("mamba_hidden_act"));
  EXPECT_THAT(error("nemotron_h", [](ordered_json& json) { json["layers_block_type"][1] = "moe"; }),
              HasSubstr("layers of experts are not built"));
  EXPECT_THAT(error("nemotron_h", [](ordered_json& json) { json["num_hidden_layers"] = 7; }),
              HasSubstr("num_hidden_layers is 7, the pattern of layers has 6"));
  // Key by key: what the key has, then what the message says of it
  const struct {
    const char *family, *key, *value, *message;
  } refused[] = {
      {"bamba", "mamba_proj_bias", "true", "mamba_proj_bias true is not built, only false"},
      {"bamba", "mamba_conv_bias", "false", "mamba_conv_bias false is not built, only true"},
      {"bamba", "mamba_d_conv", "2", "mamba_d_conv 2 is not built, only 4"},
      {"bamba", "attention_bias", "true", "attention_bias true is not built, only false"},
      {"bamba", "mlp_bias", "true", "mlp_bias true is not built, only false"},
      {"bamba", "hidden_act", "\"gelu\"", "hidden_act \"gelu\" is not built, only \"silu\""},
      {"bamba", "partial_rotary_factor", "1.0", "partial_rotary_factor 1.0 is not built, only 0.5"},
      {"bamba", "attn_layer_indices", "[3]", "attn_layer_indices names layer 3 of 3"},
      {"bamba", "mamba_n_heads", "5",
       "mamba_n_heads 5 does not divide mamba_expand hidden_size 32"},
      {"bamba", "mamba_d_head", "2",
       "mamba_n_heads 8 of mamba_d_head 2 are not mamba_expand hidden_size 32"},
      {"granitemoehybrid", "num_local_experts", "4",
       "num_local_experts is 4, models of this type are built without experts, with 0"},
      {"granitemoehybrid", "num_local_experts", "null", "num_local_experts is 8,"},
      {"granitemoehybrid", "attention_bias", "true", "attention_bias true is not built"},
      {"granitemoehybrid", "hidden_act", "\"relu\"", "hidden_act \"relu\" is not built"},
      {"granitemoehybrid", "mamba_proj_bias", "true", "mamba_proj_bias true is not built"},
      {"granitemoehybrid", "attention_multiplier", "0", "attention_multiplier 0 is not positive"},
      {"granitemoehybrid", "residual_multiplier", "0",
       "--residual-multiplier 0 is not a number other than 0"},
      {"granitemoehybrid", "logits_scaling", "0", "--logits-scaling 0 must be positive"},
      {"granitemoehybrid", "layer_types", R"(["mamba", "mamba", "moe"])",
       "layer_types names \"moe\", expected linear_attention or full_attention"},
      {"granitemoehybrid", "layer_types", R"(["mamba"])",
       "layer_types names 1 layers, num_hidden_layers is 3"},
      {"qwen3_5_text", "attention_bias", "true", "attention_bias true is not built"},
      {"qwen3_5_text", "hidden_act", "\"gelu\"", "hidden_act \"gelu\" is not built"},
      {"qwen3_5_text", "num_experts", "8", "has 8 experts per layer"},
      {"qwen3_5_text", "linear_num_value_heads", "3", "--linear-num-value-heads 3"},
  };
  for (const auto& [family, key, value, message] : refused)
    EXPECT_THAT(error(family, [&](ordered_json& json) { json[key] = ordered_json::parse(value); }),
                HasSubstr(message))
        << family << ' ' << key << ' ' << value;
}

}  // namespace
}  // namespace megatron
