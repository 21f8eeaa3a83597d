// Import of safetensors by a map of names: the same parameters as through the Hugging Face family,
// every way of concatenating and slicing, and errors.
#include "megatron/interop/name_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/verify.h"
#include "megatron/interop/foreign_tensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "tests/unit/error_of.h"
#include "tests/unit/models/stored_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const fs::path kGolden = MEGATRON_SOURCE_DIR "/tests/golden";

Tensors read_tensors(const fs::path& folder) {
  Tensors tensors;
  const TensorFiles files = TensorFiles::of_path(folder);
  for (const auto& [name, place] : files.places()) {
    const std::vector<std::byte> bytes = files.read(place);
    tensors[name] = {place.entry->dtype, place.entry->shape,
                     std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())};
  }
  return tensors;
}

// Every parameter of a checkpoint, whole.
Tensors parameters_of(const Checkpoint& checkpoint) {
  Tensors tensors;
  for (const auto& [key, stored] : checkpoint.manifest().tensors) {
    Stored out{stored.dtype, stored.shape, std::string(num_bytes(stored.dtype, stored.shape), '?')};
    ShardedTensor tensor;
    tensor.key = key;
    tensor.dtype = stored.dtype;
    tensor.global_shape = stored.shape;
    tensor.data = out.bytes.data();
    load_one(checkpoint, tensor);
    tensors[key] = std::move(out);
  }
  return tensors;
}

TransformerConfig model_of(const std::string& name) {
  TransformerConfig config;
  Config* const configs[] = {&config};
  read_yaml(configs, (kGolden / "name_map" / (name + "_model.yaml")).string());
  config.finalize();
  return config;
}

class NameMap : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            cat("name_map.", testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_ / "source");
    tensors_ = read_tensors(kGolden / "hf/llama2");
    map_ = read_file(kGolden / "name_map/llama2.yaml");
  }
  void TearDown() override { fs::remove_all(root_); }

  // The tensors and the map of this test, opened.
  ForeignModel open(const TransformerConfig& config, std::optional<int64_t> vocab_size = {}) {
    std::vector<SafetensorsTensor> list;
    for (const auto& [name, stored] : tensors_)
      list.push_back({name, stored.dtype, stored.shape, stored.bytes.data()});
    write_safetensors(root_ / "source" / "weights.safetensors", list);
    std::ofstream(root_ / "map.yaml") << map_;
    return open_mapped_model(root_ / "source", root_ / "map.yaml", config, vocab_size);
  }
  std::string error(std::optional<int64_t> vocab_size = {}) {
    return error_of([&] { open(model_of("llama2"), vocab_size); });
  }
  void replace(const std::string& from, const std::string& to) {
    const size_t at = map_.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    map_.replace(at, from.size(), to);
  }
  // Puts a larger tensor of zeros in place of one, with its rows (all columns of them) at `row`,
  // `column`.
  void embed(const std::string& name, std::vector<int64_t> shape, int64_t row, int64_t column) {
    Stored& stored = tensors_.at(name);
    const auto element = static_cast<size_t>(size_of(stored.dtype));
    Stored larger{stored.dtype, shape, std::string(num_bytes(stored.dtype, shape), '\0')};
    const size_t columns = static_cast<size_t>(stored.shape[1]) * element;
    for (size_t r = 0; r < static_cast<size_t>(stored.shape[0]); ++r)
      larger.bytes.replace(((static_cast<size_t>(row) + r) * static_cast<size_t>(shape[1]) +
                            static_cast<size_t>(column)) *
                               element,
                           columns, stored.bytes, r * columns, columns);
    stored = std::move(larger);
  }

  fs::path root_;
  Tensors tensors_;
  std::string map_;
};

TEST_F(NameMap, GivesTheParametersThatTheFamilyGives) {
  for (const auto& [family, file] : {std::pair{"llama2", "llama2.yaml"}, {"gpt2", "gpt2.json"}}) {
    const HfFolder folder = open_hf_folder(kGolden / "hf" / family);
    const fs::path source = root_ / family;
    fs::create_directories(source);
    for (const auto& item : fs::directory_iterator(kGolden / "hf" / family))
      if (item.path().filename().string().starts_with("model")) fs::copy(item, source);
    const ForeignModel mapped =
        open_mapped_model(source, kGolden / "name_map" / file, model_of(family));
    EXPECT_EQ(architecture_difference(mapped.config.transformer, folder.model.config.transformer),
              "");
    EXPECT_EQ(mapped.config.vocab_size, folder.model.config.vocab_size);
    EXPECT_EQ(mapped.num_tensors, static_cast<int64_t>(folder.tensors.size()));
    EXPECT_TRUE(mapped.waived.empty());
    const Tensors expected = parameters_of(folder.checkpoint);
    EXPECT_EQ(parameters_of(mapped.checkpoint), expected);
    EXPECT_GT(expected.size(), 10u);

    NameMapImport request{
        source, kGolden / "name_map" / file, root_ / "ours", model_of(family), {}};
    fs::remove_all(request.root);
    const ConvertResult result = import_by_name_map(request);
    EXPECT_TRUE(verify_checkpoint(result.directory).empty());
    EXPECT_EQ(parameters_of(Checkpoint(result.directory)), expected);
    EXPECT_TRUE(is_weights_only(Checkpoint(result.directory)));
  }
}

TEST_F(NameMap, ReadsOneFileByItself) {
  const fs::path file = kGolden / "hf/gpt2/model.safetensors";
  EXPECT_EQ(open_mapped_model(file, kGolden / "name_map/gpt2.json", model_of("gpt2")).num_tensors,
            28);
}

// One file per tensor of a stack, columns of a larger matrix, parts along columns, a padded table.
TEST_F(NameMap, CutsAndJoins) {
  const Tensors expected = parameters_of(open_hf_folder(kGolden / "hf/llama2").checkpoint);
  // o_proj [16, 32] of both layers as one [2, 16, 32].
  const std::string o = "model.layers.0.self_attn.o_proj.weight",
                    o1 = "model.layers.1.self_attn.o_proj.weight";
  tensors_["stack"] = {tensors_[o].dtype, {2, 16, 32}, tensors_[o].bytes + tensors_[o1].bytes};
  tensors_.erase(o);
  tensors_.erase(o1);
  replace("linear_proj.weight: model.layers.{layer}.self_attn.o_proj.weight",
          "linear_proj.weight:\n    concat: [{name: stack, slice: \"{layer}, :, :20\"}, {name: "
          "stack, slice: \"{layer}, :, 20:\"}]\n    dim: 1");
  // The table lies in a larger one.
  embed("model.embed_tokens.weight", {64, 20}, 3, 2);
  replace("weight: model.embed_tokens.weight",
          "weight: {name: model.embed_tokens.weight, slice: \"3:43, 2:18\"}");
  map_ += R"(waived:
  - {name: model.embed_tokens.weight, slice: ":3, :"}
  - {name: model.embed_tokens.weight, slice: "43:, :"}
  - {name: model.embed_tokens.weight, slice: "3:43, :2"}
  - {name: model.embed_tokens.weight, slice: "3:43, 18:"}
  - rotary.*
)";
  tensors_["rotary.inv_freq"] = {DType::kFloat32, {4}, std::string(16, '\0')};
  const ForeignModel mapped = open(model_of("llama2"));
  EXPECT_EQ(parameters_of(mapped.checkpoint), expected);
  EXPECT_EQ(mapped.waived.size(), 5u);
  EXPECT_EQ(mapped.waived.back(), "rotary.inv_freq");
}

// [inputs, outputs] matrices with queries, keys and values side by side.
TEST_F(NameMap, TransposesSlices) {
  const Tensors expected = parameters_of(open_hf_folder(kGolden / "hf/gpt2").checkpoint);
  tensors_ = read_tensors(kGolden / "hf/gpt2/model.safetensors");
  map_ = read_file(kGolden / "name_map/gpt2.json");
  std::string parts;
  for (const char* columns : {"0:16", "16:32", "32:48"})
    parts += cat(parts.empty() ? "" : ",",
                 R"({"name": "transformer.h.{layer}.attn.c_attn.weight", "slice": ":, )", columns,
                 R"(", "transpose": true})");
  replace(R"({"name": "transformer.h.{layer}.attn.c_attn.weight", "transpose": true})",
          "[" + parts + "]");
  EXPECT_EQ(parameters_of(open(model_of("gpt2")).checkpoint), expected);
}

TEST_F(NameMap, NamesWhatIsMissingLeftOverOrUsedTwice) {
  const std::string source = (root_ / "source").string(), map = (root_ / "map.yaml").string();
  tensors_.erase("model.layers.1.self_attn.k_proj.weight");
  EXPECT_EQ(error(), source +
                         ": model.layers.1.self_attn.k_proj.weight is not in the files; did you "
                         "mean model.layers.0.self_attn.k_proj.weight; " +
                         map + " makes decoder.layers.1.self_attention.linear_qkv.weight of it");
  SetUp();
  tensors_["model.layers.0.extra"] = {DType::kFloat32, {2}, "12345678"};
  EXPECT_EQ(error(), source + ": model.layers.0.extra [2] is in the files, " + map +
                         " neither uses nor waives it");
  SetUp();
  replace("  output_layer.weight: lm_head.weight", "");
  EXPECT_THAT(error(), HasSubstr(": has no entry for output_layer.weight, which the model has "
                                 "with shape [40,16]\ndetail: lm_head.weight [40,16] is in"));
  SetUp();
  replace("output_layer.weight: lm_head.weight", "output_layer.weight: model.embed_tokens.weight");
  EXPECT_THAT(error(), HasSubstr("model.embed_tokens.weight is used twice: "
                                 "embedding.word_embeddings.weight and output_layer.weight"));
  SetUp();
  map_ += "waived: [lm_*]";
  EXPECT_THAT(error(), HasSubstr("lm_head.weight is used twice: output_layer.weight and waived"));
  SetUp();
  map_ += "waived: [masks.*]";
  EXPECT_EQ(error(),
            source + ": " + map + ": waived: masks.* is the name of no tensor in the files");
  SetUp();
  replace("output_layer.weight: lm", "output_layr.weight: lm");
  EXPECT_THAT(error(), HasSubstr(map + ": the model has no parameter output_layr.weight; did you "
                                       "mean output_layer.weight"));
  SetUp();
  replace("decoder.final_layernorm.weight", "decoder.layers.{layer}.mlp.linear_fc3.weight");
  EXPECT_THAT(error(), HasSubstr("the model has no parameter "
                                 "decoder.layers.{layer}.mlp.linear_fc3.weight; did you mean "
                                 "decoder.layers.{layer}.mlp.linear_fc"));
  SetUp();
  map_ += "  decoder.layers.1.mlp.linear_fc2.weight: lm_head.weight\n";
  EXPECT_THAT(error(), HasSubstr("decoder.layers.1.mlp.linear_fc2.weight is made by "
                                 "decoder.layers.{layer}.mlp.linear_fc2.weight and by "
                                 "decoder.layers.1.mlp.linear_fc2.weight"));
  SetUp();
  replace("final_layernorm.weight: model.norm.weight",
          "final_layernorm.weight: {name: model.norm.weight, slice: \"0:12\"}");
  EXPECT_THAT(error(), HasSubstr("model.norm.weight[0:12] has shape [12], as "
                                 "decoder.final_layernorm.weight it is [16]\ndetail: "
                                 "model.norm.weight [16]: " +
                                 map + " neither uses nor waives 4 of its 16 elements"));
}

TEST_F(NameMap, NamesShapesFoundAndExpected) {
  const std::string down = "model.layers.0.mlp.down_proj.weight";
  tensors_.at(down).shape = {24, 16};
  EXPECT_THAT(error(), HasSubstr(down + " has shape [24,16], as decoder.layers.0.mlp.linear_fc2."
                                        "weight it is [16,24] (transpose?)"));
  SetUp();
  replace("model.layers.{layer}.mlp.up_proj.weight",
          "{name: \"model.layers.{layer}.mlp.up_proj.weight\", slice: \"0:8, :\"}");
  EXPECT_THAT(error(), HasSubstr("model.layers.0.mlp.gate_proj.weight [24,16], "
                                 "model.layers.0.mlp.up_proj.weight[0:8, :] [8,16] joined along "
                                 "dimension 0 have 32 there, "
                                 "decoder.layers.0.mlp.linear_fc1.weight has shape [48,16]"));
  SetUp();
  tensors_.at("model.layers.0.self_attn.k_proj.weight").shape = {32, 8};
  EXPECT_THAT(error(), HasSubstr("model.layers.0.self_attn.k_proj.weight has shape [32,8], as a "
                                 "part of decoder.layers.0.self_attention.linear_qkv.weight it "
                                 "is [16,16]"));
  SetUp();
  EXPECT_THAT(error(38), HasSubstr("model.embed_tokens.weight has shape [40,16], as "
                                   "embedding.word_embeddings.weight it is [38,16] by the "
                                   "vocabulary (slice, and waive the rest?)"));
  SetUp();
  tensors_.at("lm_head.weight").dtype = DType::kInt16;
  EXPECT_THAT(error(), HasSubstr("lm_head.weight is stored as I16, which is no type of weights"));
  SetUp();
  Stored& gate = tensors_.at("model.layers.0.mlp.gate_proj.weight");
  gate.dtype = DType::kFloat16;
  EXPECT_THAT(error(), HasSubstr("model.layers.0.mlp.up_proj.weight is stored as BF16, other parts "
                                 "of decoder.layers.0.mlp.linear_fc1.weight as F16"));
  SetUp();
  replace("final_layernorm.weight: model.norm.weight",
          "final_layernorm.weight: {name: model.norm.weight, slice: \"0:17\"}");
  EXPECT_THAT(error(), HasSubstr("model.norm.weight has shape [16], slice \"0:17\": \"0:17\" is no "
                                 "range within 16"));
  SetUp();
  replace("final_layernorm.weight: model.norm.weight",
          "final_layernorm.weight: {name: model.embed_tokens.weight, slice: \"0:16, 0\"}");
  EXPECT_THAT(error(), HasSubstr("model.embed_tokens.weight[0:16, 0] takes single elements out of "
                                 "rows of model.embed_tokens.weight"));
  SetUp();
  replace("linear_fc2.weight: model.layers.{layer}.mlp.down_proj.weight",
          "linear_fc2.weight: {qkv: \"model.layers.{layer}.mlp.down_proj.weight\"}");
  EXPECT_THAT(error(), HasSubstr("decoder.layers.0.mlp.linear_fc2.weight has no queries, keys and "
                                 "values, so qkv cannot make it"));
}

TEST_F(NameMap, NamesTheLineOfAMapThatCannotBeRead) {
  const std::string map = (root_ / "map.yaml").string();
  const auto of = [&](const std::string& text) {
    map_ = text;
    return error();
  };
  EXPECT_EQ(of("parameters:\n  a: {nam: b}\n"),
            map + ":2: \"nam\" is unknown, expected name, slice, transpose");
  EXPECT_EQ(of("parameters:\n  a: {slice: \"1\"}\n"), map + ":2: expected \"name:\" of a tensor");
  EXPECT_EQ(of("tensors:\n  a: b\n"),
            map + ":1: \"tensors\" is unknown, expected parameters or waived");
  EXPECT_EQ(of("parameters:\n  a: b\n  a: c\n"), map + ":3: a stands here twice");
  EXPECT_EQ(of("parameters:\n  a: {qkv: [b, c]}\n"),
            map + ":2: qkv: expected queries, keys and values as three sources, or one with all");
  EXPECT_EQ(of("parameters:\n  a: {concat: [b], dim: 2}\n"), map + ":2: dim: expected 0 or 1");
  EXPECT_EQ(of("waived: [b]\n"), map + ":1: names no parameters");
  EXPECT_THAT(of("parameters: [\n"), HasSubstr(map + ":"));
  EXPECT_EQ(of("parameters:\n  a: b\n"),
            map + ": has no entry for embedding.word_embeddings.weight, which every model has");
  EXPECT_THROW(open_mapped_model(root_ / "source", root_ / "map.yaml", TransformerConfig()), Error);
}

}  // namespace
}  // namespace megatron
