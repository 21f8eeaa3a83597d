// config.json of Mamba-2 models and hybrids: limits of time steps, patterns, what is refused.
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
}

}  // namespace
}  // namespace megatron
