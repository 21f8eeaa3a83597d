// Folders of larger models, of which the text is read: Qwen 3.5 as it is published.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "tests/unit/error_of.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/stored_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;
using testing::HasSubstr;

const fs::path kQwen = MEGATRON_SOURCE_DIR "/tests/golden/hf_enclosed/qwen3_5";

std::string config_of(const fs::path& folder) { return read_file(folder / "config.json"); }

HfModel text_of(const ordered_json& json) {
  return parse_hf_config(hf_config_of_text_model(json.dump(), "config.json"), "config.json");
}

// The weights of the text are those of qwen3_5_text, whose logits and gradients are goldens.
TEST(HfEnclosed, TheTextOfQwen35) {
  const fs::path root = fs::path(testing::TempDir()) / "hf_enclosed";
  fs::remove_all(root);
  const ConvertResult in = import_hf_folder(kQwen, root / "ours");
  EXPECT_EQ(in.model_type, "qwen3_5_text");
  EXPECT_EQ(in.waived.size(), 21) << "of the tower for pictures";
  for (const std::string& name : in.waived) EXPECT_THAT(name, HasSubstr("model.visual."));
  export_hf_folder({root / "ours", {}, root / "theirs", "", 1 << 20});
  EXPECT_EQ(read_stored_tensors(root / "theirs" / "model.safetensors"),
            read_stored_tensors(fs::path(hf_golden_folder("qwen3_5_text")) / "model.safetensors"));
  const auto written = ordered_json::parse(read_file(root / "theirs" / "config.json"));
  EXPECT_EQ(written["model_type"], "qwen3_5_text");
  EXPECT_EQ(written["architectures"], ordered_json::array({"Qwen3_5ForCausalLM"}));
  const HfModel text = parse_hf_config(config_of(hf_golden_folder("qwen3_5_text")), "config.json"),
                again = parse_hf_config(written.dump(), "config.json");
  EXPECT_EQ(architecture_difference(text.config.transformer, again.config.transformer), "");
  fs::remove_all(root);
}

// What the larger model says of ties, types and quantised weights holds for its text.
TEST(HfEnclosed, SettingsOfTheLargerModel) {
  ordered_json json = ordered_json::parse(config_of(kQwen));
  EXPECT_TRUE(text_of(json).config.transformer.untie_embeddings_and_output_weights);
  json["tie_word_embeddings"] = true;
  json["dtype"] = "float16";
  json["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const HfModel model = text_of(json);
  EXPECT_FALSE(model.config.transformer.untie_embeddings_and_output_weights);
  EXPECT_EQ(model.dtype, DType::kFloat16);
  EXPECT_EQ(model.quantization, "fp8");
  json["text_config"] = 3;
  EXPECT_THAT(error_of([&] { text_of(json); }), HasSubstr("text_config is 3, expected an object"));
  json.erase("text_config");
  EXPECT_EQ(error_of([&] { text_of(json); }), "config.json: has no text_config");
}

}  // namespace
}  // namespace megatron
