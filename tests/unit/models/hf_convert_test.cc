// Conversion of Hugging Face folders both ways: the same bytes, both dialects, and what is refused.
#include "megatron/interop/huggingface/hf_convert.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/dist_checkpointing/verify.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"
#include "tests/unit/models/hf_golden.h"
#include "tests/unit/models/stored_tensors.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

fs::path golden(const std::string& name) {
  return fs::path(MEGATRON_SOURCE_DIR "/tests/golden/hf") / name;
}

// A folder of its own for each test.
class HfConvert : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = cat(test->test_suite_name(), ".", test->name());
    std::replace(name.begin(), name.end(), '/', '_');
    root_ = fs::path(testing::TempDir()) / name;
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  // A copy of a golden's folder to spoil.
  fs::path copy(const std::string& name) {
    const fs::path to = root_ / name;
    fs::copy(golden(name), to);
    fs::remove(to / "golden.safetensors");
    return to;
  }
  static void edit_config(const fs::path& folder, const std::function<void(ordered_json&)>& edit) {
    ordered_json json = ordered_json::parse(read_file(folder / "config.json"));
    edit(json);
    std::ofstream(folder / "config.json") << json;
  }

  fs::path root_;
};

Tensors read_folder(const fs::path& folder) {
  Tensors tensors;
  for (const auto& item : fs::directory_iterator(folder))
    if (item.path().extension() == ".safetensors" && item.path().filename() != "golden.safetensors")
      tensors.merge(read_stored_tensors(item.path()));
  return tensors;
}

void write_folder(const fs::path& folder, const Tensors& tensors) {
  for (const auto& item : fs::directory_iterator(folder))
    if (item.path().filename().string().starts_with("model")) fs::remove(item.path());
  std::vector<SafetensorsTensor> list;
  for (const auto& [name, stored] : tensors)
    list.push_back({name, stored.dtype, stored.shape, stored.bytes.data()});
  write_safetensors(folder / "model.safetensors", list);
}

std::string open_error(const fs::path& folder) {
  const std::string text = error_of([&] { open_hf_folder(folder); });
  const std::string prefix = folder.string();
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

class HfRoundTrip : public HfConvert, public testing::WithParamInterface<std::string> {};

TEST_P(HfRoundTrip, EveryTensorHasTheSameBytes) {
  const fs::path source = golden(GetParam());
  const ConvertResult in = import_hf_folder(source, root_ / "ours");
  const std::vector<std::string> copies = {"model.layers.2.embed_tokens.weight",
                                           "model.layers.2.shared_head.head.weight"};
  const bool has_copies = GetParam() == "deepseek_v3" || GetParam() == "glm4_moe";
  EXPECT_EQ(in.waived, has_copies ? copies : std::vector<std::string>());
  EXPECT_TRUE(verify_checkpoint(in.directory).empty());
  const ConvertResult out = export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 6000});
  EXPECT_EQ(out.model_type, in.model_type);
  EXPECT_EQ(out.num_tensors, in.num_tensors + std::ssize(in.waived));
  EXPECT_TRUE(fs::exists(root_ / "theirs" / "model.safetensors.index.json"))
      << "shards of 6 kB at most";
  Tensors before = read_folder(source);
  const Tensors after = read_folder(root_ / "theirs");
  if (GetParam() == "gpt_neox_sequential") {  // transformers 5's name becomes the published one
    auto head = before.extract("lm_head.weight");
    head.key() = "embed_out.weight";
    before.insert(std::move(head));
  }
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [name, tensor] : before) EXPECT_EQ(after.at(name), tensor) << name;

  // The configuration means the same, in the newer dialect; what is no setting of ours stays.
  const HfModel a = read_hf_config(source), b = read_hf_config(root_ / "theirs");
  EXPECT_EQ(architecture_difference(a.config.transformer, b.config.transformer), "");
  EXPECT_EQ(a.config.vocab_size, b.config.vocab_size);
  EXPECT_EQ(a.config.transformer.max_position_embeddings,
            b.config.transformer.max_position_embeddings);
  const ordered_json json = ordered_json::parse(read_file(root_ / "theirs" / "config.json"));
  EXPECT_EQ(json["dtype"], "bfloat16");
  for (const char* old :
       {"torch_dtype", "rope_theta", "rope_scaling", "rotary_pct", "rope_local_base_freq"})
    EXPECT_FALSE(json.contains(old)) << old;
  EXPECT_EQ(json.contains("rope_parameters"),
            a.config.transformer.position_embedding_type == PositionEmbedding::kRope);
  EXPECT_EQ(json["eos_token_id"], 2);
  EXPECT_EQ(read_file(root_ / "theirs" / "generation_config.json"),
            read_file(source / "generation_config.json"));
}

TEST_P(HfRoundTrip, TheConvertedCheckpointIsTheFolder) {
  import_hf_folder(golden(GetParam()), root_);
  const ParallelGroups groups;
  LoadModelRequest a, b;
  a.load = golden(GetParam());
  b.load = root_;
  const LoadedModel direct = load_model(a, groups), converted = load_model(b, groups);
  EXPECT_EQ(architecture_difference(direct.config.transformer, converted.config.transformer), "");
  EXPECT_EQ(direct.config.vocab_size, converted.config.vocab_size);
  std::map<std::string, at::Tensor> values;
  direct.model->visit(
      [&](const std::string& name, Parameter& parameter) { values[name] = parameter.value; });
  converted.model->visit([&](const std::string& name, Parameter& parameter) {
    EXPECT_EQ(parameter.value.scalar_type(), value_type(parameter, at::kBFloat16)) << name;
    EXPECT_TRUE(at::equal(values.at(name), parameter.value)) << name;
  });
}

INSTANTIATE_TEST_SUITE_P(Families, HfRoundTrip,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfGoldens),
                                                                    std::end(kHfGoldens))),
                         [](const auto& param) { return param.param; });

TEST_F(HfConvert, StreamsOneTensorAtATime) {
  uint64_t total = 0, done = 0;
  int64_t calls = 0;
  import_hf_folder(golden("llama2"), root_ / "ours", [&](uint64_t all, uint64_t bytes) {
    total = all;
    done += bytes;
    ++calls;
  });
  EXPECT_EQ(done, total);
  EXPECT_GT(calls, 10);
}

TEST_F(HfConvert, TokenizerFilesAreCopied) {
  const fs::path folder = copy("llama3");
  std::ofstream(folder / "tokenizer.json") << "{}";
  std::ofstream(folder / "tokenizer_config.json") << "{\"a\": 1}";
  import_hf_folder(folder, root_ / "ours");
  export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20});
  EXPECT_EQ(read_file(root_ / "theirs" / "tokenizer.json"), "{}");
  EXPECT_EQ(read_file(root_ / "theirs" / "tokenizer_config.json"), "{\"a\": 1}");
}

TEST_F(HfConvert, BareNamesOfTheBaseModelAreRead) {
  const fs::path folder = copy("gpt2");
  Tensors bare;
  for (auto& [name, tensor] : read_folder(folder))
    bare[name.substr(std::string("transformer.").size())] = tensor;
  bare["h.0.attn.bias"] = {
      DType::kFloat32, {1}, std::string(4, '\0')};  // a mask, as old files have it
  write_folder(folder, bare);
  EXPECT_EQ(open_hf_folder(folder).waived, std::vector<std::string>{"h.0.attn.bias"});
}

TEST_F(HfConvert, MissingAndLeftOverTensorsAreNamed) {
  const fs::path folder = copy("mistral");
  Tensors tensors = read_folder(folder);
  tensors["model.layers.0.self_attn.extra.weight"] = tensors.at("model.norm.weight");
  tensors.erase("model.layers.1.mlp.up_proj.weight");
  write_folder(folder, tensors);
  EXPECT_EQ(
      open_error(folder),
      ": model.layers.1.mlp.up_proj.weight is not in the files, the model of config.json has it\n"
      "detail: model.layers.0.self_attn.extra.weight is in the files, the model of config.json has "
      "no such tensor");
}

TEST_F(HfConvert, SwappedShapesAreNamed) {
  const fs::path folder = copy("mistral");
  Tensors tensors = read_folder(folder);
  Stored& gate = tensors.at("model.layers.0.mlp.gate_proj.weight");
  std::swap(gate.shape[0], gate.shape[1]);
  write_folder(folder, tensors);
  EXPECT_EQ(
      open_error(folder),
      ": model.layers.0.mlp.gate_proj.weight has shape [16,24], by config.json it is [24,16]");
}

// -- experts

TEST_F(HfConvert, EveryExpertIsAccountedFor) {
  const fs::path folder = copy("qwen2_moe");
  const Tensors whole = read_folder(folder);
  const std::string second = "model.layers.2.mlp.experts.";
  const auto expect = [&](const std::function<void(Tensors&)>& edit, const std::string& message) {
    Tensors tensors = whole;
    edit(tensors);
    write_folder(folder, tensors);
    EXPECT_EQ(open_error(folder), message);
  };
  const auto erase = [&](Tensors& tensors, int64_t expert) {
    for (const char* part : {"gate", "up", "down"})
      ASSERT_EQ(tensors.erase(cat(second, expert, ".", part, "_proj.weight")), 1u);
  };
  expect(
      [&](Tensors& tensors) { erase(tensors, 5); },
      ": model.layers.2.mlp.experts.*: expert 5 is not in the files, config.json gives 6 experts");
  expect(
      [&](Tensors& tensors) {
        for (const int64_t expert : {0, 2, 3, 4}) erase(tensors, expert);
      },
      ": model.layers.2.mlp.experts.*: experts 0, 2 to 4 are not in the files, config.json gives 6 "
      "experts");
  expect(
      [&](Tensors& tensors) { tensors.erase(second + "1.up_proj.weight"); },
      ": model.layers.2.mlp.experts.1.up_proj.weight is not in the files, the model of config.json "
      "has it");
  expect(
      [&](Tensors& tensors) {
        for (const char* part : {"gate", "up", "down"})
          tensors[cat(second, "6.", part, "_proj.weight")] =
              tensors.at(cat(second, "5.", part, "_proj.weight"));
      },
      ": model.layers.2.mlp.experts.*: expert 6 is in the files, config.json gives 6 experts");
  expect(
      [&](Tensors& tensors) {
        std::swap(tensors.at(second + "3.down_proj.weight").shape[0],
                  tensors.at(second + "3.down_proj.weight").shape[1]);
      },
      ": model.layers.2.mlp.experts.3.down_proj.weight has shape [8,32], by config.json it is "
      "[32,8]");
  write_folder(folder, whole);
  edit_config(folder, [](ordered_json& json) { json["num_experts"] = 4; });
  const std::string error = open_error(folder);
  EXPECT_NE(error.find(": experts 4 to 5 are in the files, config.json gives 4 experts"),
            std::string::npos)
      << error;
}

// All experts of a layer in one tensor, as transformers has them in memory.
Tensors stacked_experts(const Tensors& tensors, const std::vector<std::string>& gate_up,
                        const std::string& down, const std::string& block) {
  Tensors out;
  const auto append = [&](const std::string& name, const Stored& expert, int64_t rows) {
    Stored& all =
        out.try_emplace(name, Stored{expert.dtype, {0, rows, expert.shape[1]}, ""}).first->second;
    all.bytes += expert.bytes;
    all.shape[0] = static_cast<int64_t>(all.bytes.size()) / 2 / rows / expert.shape[1];
  };
  for (const auto& [name, stored] : tensors) {
    const size_t at = name.find(block);
    const size_t experts = name.find(".experts.");
    if (at == std::string::npos) {
      out[name] = stored;
    } else if (experts == std::string::npos) {
      out[replaced(name, block, ".mlp.")] = stored;
    }
  }
  for (int64_t layer = 0; layer < 2; ++layer)
    for (int64_t e = 0; tensors.contains(cat("model.layers.", layer, block, "experts.", e, down));
         ++e) {
      const std::string expert = cat("model.layers.", layer, block, "experts.", e);
      const std::string stack = cat("model.layers.", layer, ".mlp.experts.");
      for (const std::string& part : gate_up)
        append(stack + "gate_up_proj", tensors.at(expert + part),
               2 * tensors.at(expert + part).shape[0]);
      append(stack + "down_proj", tensors.at(expert + down), tensors.at(expert + down).shape[0]);
    }
  return out;
}

TEST_F(HfConvert, StackedExpertsAreReadToo) {
  const fs::path folder = copy("mixtral");
  const Tensors apart = read_folder(folder);
  const Tensors stacked =
      stacked_experts(apart, {".w1.weight", ".w3.weight"}, ".w2.weight", ".block_sparse_moe.");
  ASSERT_EQ(stacked.at("model.layers.1.mlp.experts.gate_up_proj").shape,
            (std::vector<int64_t>{4, 48, 16}));
  ASSERT_EQ(stacked.size(), apart.size() - 2 * 4 * 3 + 2 * 2);
  write_folder(folder, stacked);
  import_hf_folder(folder, root_ / "ours");
  export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20});
  const Tensors after = read_folder(root_ / "theirs");
  ASSERT_EQ(after.size(), apart.size());
  for (const auto& [name, tensor] : apart) EXPECT_EQ(after.at(name), tensor) << name;
  edit_config(folder, [](ordered_json& json) { json["num_local_experts"] = 5; });
  const std::string error = open_error(folder);
  EXPECT_NE(
      error.find("model.layers.0.mlp.experts.gate_up_proj has shape [4,48,16], by config.json "
                 "it is [5,48,16]"),
      std::string::npos)
      << error;
}

TEST_F(HfConvert, LayersOfMultiTokenPredictionShareTheTables) {
  const fs::path folder = copy("deepseek_v3");
  const Tensors whole = read_folder(folder);
  Tensors tensors = whole;
  tensors.at("model.layers.2.shared_head.head.weight").bytes[3] ^= 1;
  write_folder(folder, tensors);
  EXPECT_EQ(open_error(folder),
            ": model.layers.2.shared_head.head.weight differs from lm_head.weight, although the "
            "layers share it");
  tensors = whole;
  tensors.erase("model.layers.2.hnorm.weight");
  write_folder(folder, tensors);
  EXPECT_EQ(open_error(folder),
            ": model.layers.2.hnorm.weight is not in the files, the model of config.json has it");
  // As transformers writes it: the layer is named in config.json and not in the files.
  std::erase_if(tensors,
                [](const auto& item) { return item.first.starts_with("model.layers.2."); });
  write_folder(folder, tensors);
  EXPECT_EQ(open_hf_folder(folder).model.config.transformer.mtp_num_layers, 0);
}

TEST_F(HfConvert, SettingsOfExpertsThatAreNotBuiltAreNamed) {
  const auto error = [&](const char* name, const char* key, const ordered_json& value) {
    ordered_json json = ordered_json::parse(read_file(golden(name) / "config.json"));
    json[key] = value;
    return error_of([&] { parse_hf_config(json.dump(), "c"); });
  };
  EXPECT_EQ(error("olmoe", "clip_qkv", 8.0), "c: clip_qkv 8.0 is not built, only null");
  EXPECT_EQ(error("deepseek_v2", "norm_topk_prob", true),
            "c: norm_topk_prob true is not built, only false");
  EXPECT_EQ(error("deepseek_v2", "topk_method", "noaux_tc"),
            "c: topk_method \"noaux_tc\" is not built, only greedy and group_limited_greedy");
  EXPECT_EQ(error("deepseek_v2", "num_key_value_heads", 2),
            "c: num_key_value_heads 2 is not num_attention_heads 4, but the heads of latent "
            "attention share one latent");
  EXPECT_EQ(error("deepseek_v3", "rope_interleave", false),
            "c: rope_interleave false is not built, only true");
  EXPECT_EQ(error("deepseek_v3", "norm_topk_prob", false),
            "c: norm_topk_prob false is not built, only true");
  EXPECT_EQ(error("deepseek_v3", "topk_group", 1),
            "c: num_experts_per_tok 4 with topk_group 1 is not built: groups are ranked by their 2 "
            "best experts, which are num_experts_per_tok / topk_group");
  EXPECT_EQ(error("deepseek_v3", "first_k_dense_replace", 2), "c: no layer has experts");
  EXPECT_EQ(error("qwen3_moe", "num_experts", 0), "c: num_experts is 0, expected 1 to 65536");
  EXPECT_EQ(error("deepseek_v3", "num_nextn_predict_layers", 100000),
            "c: num_nextn_predict_layers is 100000, expected 0 to 1000");
  EXPECT_EQ(error("qwen3_moe", "mlp_only_layers", 1),
            "c: mlp_only_layers is 1, expected a list of whole numbers");
  EXPECT_EQ(error("deepseek_v3", "rope_scaling",
                  {{"type", "yarn"}, {"factor", 4}, {"mscale_all_dim", 1.0}}),
            "c: rotary positions with mscale_all_dim 1 and without mscale are not built");
  EXPECT_EQ(error("deepseek_v3", "rope_scaling", {{"type", "linear"}, {"factor", 4}}),
            "c: rotary positions of the type \"linear\" are not built"
            "\nhint: types that are: default, yarn");
}

TEST_F(HfConvert, TypesWithinATensorMustAgree) {
  const fs::path folder = copy("mistral");
  Tensors tensors = read_folder(folder);
  Stored& up = tensors.at("model.layers.0.mlp.up_proj.weight");
  up.dtype = DType::kFloat32;
  up.bytes.resize(up.bytes.size() * 2);
  write_folder(folder, tensors);
  EXPECT_EQ(open_error(folder),
            ": model.layers.0.mlp.up_proj.weight is stored as F32, other parts of "
            "decoder.layers.0.mlp.linear_fc1.weight as BF16");
}

TEST_F(HfConvert, AMissingTieIsNamed) {
  const fs::path folder = copy("llama3");  // tied
  edit_config(folder, [](ordered_json& json) { json["tie_word_embeddings"] = false; });
  EXPECT_EQ(
      open_error(folder),
      ": lm_head.weight is not in the files, although config.json does not tie the output layer to "
      "the embedding (tie_word_embeddings)");
}

TEST_F(HfConvert, ATiedHeadMustBeTheTable) {
  const fs::path folder = copy("llama3");
  Tensors tensors = read_folder(folder);
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  write_folder(folder, tensors);
  EXPECT_EQ(open_hf_folder(folder).waived, std::vector<std::string>{"lm_head.weight"});
  tensors["lm_head.weight"].bytes[0] ^= 1;
  write_folder(folder, tensors);
  EXPECT_EQ(open_error(folder),
            ": lm_head.weight differs from model.embed_tokens.weight, although config.json ties "
            "them (tie_word_embeddings)");
}

TEST_F(HfConvert, TheRotaryFormIsCompared) {
  const fs::path folder = copy("llama2");
  Tensors tensors = read_folder(folder);
  std::vector<float> frequencies;
  for (int i = 0; i < 4; ++i)
    frequencies.push_back(static_cast<float>(std::pow(10000.0, -i / 4.0)));
  const auto store = [&] {
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
        DType::kFloat32, {4}, std::string(reinterpret_cast<const char*>(frequencies.data()), 16)};
    write_folder(folder, tensors);
  };
  store();
  EXPECT_EQ(open_hf_folder(folder).waived.size(), 1u);
  frequencies[1] *= 1.5f;
  store();
  EXPECT_NE(open_error(folder).find(
                "model.layers.0.self_attn.rotary_emb.inv_freq holds other rotary frequencies than "
                "config.json gives"),
            std::string::npos);
  edit_config(folder, [](ordered_json& json) { json["head_dim"] = 4; });
  EXPECT_NE(open_error(folder), "");
}

TEST_F(HfConvert, ACutFileIsRefused) {
  const fs::path folder = copy("mistral");
  fs::resize_file(folder / "model.safetensors", fs::file_size(folder / "model.safetensors") - 100);
  EXPECT_NE(open_error(folder).find("/model.safetensors: the tensors take "), std::string::npos)
      << open_error(folder);
}

TEST_F(HfConvert, IndexAndFilesMustAgree) {
  const fs::path folder = copy("llama2");
  ordered_json index = ordered_json::parse(read_file(folder / "model.safetensors.index.json"));
  ordered_json other = index;
  other["weight_map"]["model.ghost"] = index["weight_map"]["model.norm.weight"];
  std::ofstream(folder / "model.safetensors.index.json") << other;
  EXPECT_NE(open_error(folder).find("says that model.ghost is in model-0000"), std::string::npos);
  index["weight_map"]["lm_head.weight"] = "model-00009-of-00009.safetensors";
  std::ofstream(folder / "model.safetensors.index.json") << index;
  EXPECT_NE(open_error(folder).find(
                "names model-00009-of-00009.safetensors, which the folder does not hold"),
            std::string::npos);
}

TEST_F(HfConvert, ATensorIsInOneFileOnlyAndListed) {
  const fs::path folder = copy("llama2"), index = folder / "model.safetensors.index.json";
  const std::string first = "model-00001-of-00002.safetensors";
  const Tensors tensors = read_stored_tensors(folder / first);
  const Tensors others = read_stored_tensors(folder / "model-00002-of-00002.safetensors");
  const auto [other_name, other] = *others.begin();
  const auto rewrite = [&](const std::string& name) {
    std::vector<SafetensorsTensor> list;
    for (const auto& [key, value] : tensors)
      list.push_back({key, value.dtype, value.shape, value.bytes.data()});
    list.push_back({name, other.dtype, other.shape, other.bytes.data()});
    write_safetensors(folder / first, list);
  };
  rewrite(other_name);
  EXPECT_EQ(open_error(folder), cat(": tensor ", other_name, " is in ", first,
                                    " and in model-00002-of-00002.safetensors"));
  rewrite("model.unlisted");
  const std::string name = "/model.safetensors.index.json";
  EXPECT_EQ(open_error(folder), name + ": does not list model.unlisted, which is in " + first);
  std::ofstream(index) << "{}";
  EXPECT_EQ(open_error(folder), name + ": has no object weight_map");
  std::ofstream(index) << R"({"weight_map": {"a": 1}})";
  EXPECT_EQ(open_error(folder), name + ": the file of a is no string");
  std::ofstream(index) << R"({"weight_map": {"a": "../x.safetensors"}})";
  EXPECT_EQ(open_error(folder), name + ": \"../x.safetensors\" is no name of a file in the folder");
}

TEST_F(HfConvert, PicklesAreNotRead) {
  const fs::path folder = copy("mistral");
  fs::rename(folder / "model.safetensors", folder / "pytorch_model.bin");
  EXPECT_EQ(
      open_error(folder),
      ": holds neither model.safetensors nor model.safetensors.index.json"
      "\nhint: pytorch_model.bin is a pickle, which is never read; save the model as safetensors");
}

// Without tokenizer_config.json transformers would not know where a text ends.
TEST_F(HfConvert, ATokenizerIsExportedWithItsConfiguration) {
  const fs::path folder = copy("llama2");
  const fs::path tokenizers = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/tokenizers";
  fs::copy_file(tokenizers / "llama3.json", folder / "tokenizer.json",
                fs::copy_options::overwrite_existing);
  fs::remove(folder / "tokenizer_config.json");
  import_hf_folder(folder, root_ / "ours");
  export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20});
  const auto json = ordered_json::parse(read_file(root_ / "theirs" / "tokenizer_config.json"));
  EXPECT_EQ(json["tokenizer_class"], "PreTrainedTokenizerFast");
  EXPECT_EQ(json["eos_token"], "<|endoftext|>");
  EXPECT_EQ(json["model_max_length"],
            read_hf_config(folder).config.transformer.max_position_embeddings);

  // One that came along is kept as it was.
  const std::string own = R"({"eos_token": "<|endoftext|>", "own": 1})";
  std::ofstream(folder / "tokenizer_config.json") << own;
  import_hf_folder(folder, root_ / "ours2");
  export_hf_folder({root_ / "ours2", {}, root_ / "theirs2", "", 1 << 20});
  EXPECT_EQ(read_file(root_ / "theirs2" / "tokenizer_config.json"), own);
}

// 39 configurations that are no model's, or no model of ours: each names the file, and its place.
TEST_F(HfConvert, BrokenConfigurationsAreNamed) {
  const fs::path folder = copy("llama2");
  const std::string path = (folder / "config.json").string(), good = read_file(path);
  int count = 0;
  const auto expect = [&](const std::string& text, const std::string& error) {
    ++count;
    std::ofstream(path, std::ios::binary) << text;
    EXPECT_TRUE(is_hf_folder(folder));
    LoadModelRequest request;
    request.load = folder;
    const std::string message = error_of([&] { open_model(request); });
    EXPECT_TRUE(message.starts_with(path + error)) << text.substr(0, 200) << "\n" << message;
  };
  const auto expect_edited = [&](const std::function<void(ordered_json&)>& edit,
                                 const std::string& error) {
    ordered_json json = ordered_json::parse(good);
    edit(json);
    expect(json.dump(2), error);
  };
  const auto expect_value = [&](const char* key, const ordered_json& value,
                                const std::string& error) {
    expect_edited([&](ordered_json& json) { json[key] = value; }, error);
  };
  expect("", ": is empty\nhint: a configuration is an object with a model_type");
  expect(" \n\t", ": is empty");
  expect("{}", ": has no model_type\nhint: ");
  expect("[]", ": holds array [], expected an object with the settings of a model");
  expect("null", ": holds null null, expected an object");
  expect("3", ": holds number 3, expected an object");
  expect("\"text\"", ": holds string \"text\", expected an object");
  expect("<html>\n<body>404</body></html>", ":1:1: is not JSON: ");
  expect("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ":1:1: is not JSON: ");
  expect("\x80\x04\x95random\xff", ":1:1: is not JSON: ");
  expect(std::string(1000, '\0'), ":1:1: is not JSON: ");
  expect(std::string(100000, '['), ":1:100001: is not JSON: ");
  expect("{\"a\": [" + std::string(100000, '['), ":1:");
  expect(good.substr(0, good.size() / 2), ":");
  expect("{\n  \"model_type\": \"llama\",\n  \"rope_theta\": Infinity\n}",
         ":3:17: is not JSON: Infinity and NaN are no numbers of JSON\nhint: write the number that "
         "is meant");
  expect("{\n  \"rope_theta\": NaN}", ":2:17: is not JSON: Infinity and NaN");
  expect("{\"rope_theta\": -Infinity}", ":1:17: is not JSON: Infinity and NaN");
  expect("{'model_type': 'llama'}", ":1:2: is not JSON: ");
  expect("{\"model_type\": \"llama\",}", ":1:24: is not JSON: ");
  expect(good + good, ":");
  expect_edited([](ordered_json& json) { json.erase("model_type"); }, ": has no model_type");
  expect_value("model_type", nullptr, ": has no model_type");
  expect_value("model_type", "", ": has no model_type");
  expect_value("model_type", 7, ": model_type is 7, expected a string");
  expect_value("model_type", "mamba",
               ": models of the type \"mamba\" are not known\nhint: types that are: ");
  expect_edited([](ordered_json& json) { json["num_local_experts"] = 8; },
                ": has 8 experts per layer, which a \"llama\" model has not");
  expect_value(
      "quantization_config", {{"quant_method", "gptq"}, {"bits", 4}},
      ": the weights are quantised by gptq (quantization_config), which is not built\nhint: ");
  expect_value("quantization_config", {{"bits", 4}},
               ": the weights are quantised by a method without a name");
  expect_value("quantization_config", "int8",
               ": quantization_config is \"int8\", expected an object");
  expect_value("hidden_size", -1, ": hidden_size is -1, expected 0 to 2147483647");
  expect_value("hidden_size", 1e300, ": hidden_size is 1e+300, expected 0 to 2147483647");
  expect_value("num_attention_heads", 0, ": ");
  expect_value("num_hidden_layers", "two",
               ": num_hidden_layers is \"two\", expected a whole number");
  expect_value("vocab_size", nullptr, ": has no vocab_size");
  expect_value("rope_scaling", ordered_json::array({1}), ": ");
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(error_of([&] {
                read_hf_config(folder);
              }).starts_with("cannot read " + path + ": it is a FIFO"));
  EXPECT_EQ(count + 1, 36);
}

TEST_F(HfConvert, UnknownModelsAndSettingsAreNamed) {
  const fs::path folder = copy("llama2");
  const auto config_error = [&](const std::function<void(ordered_json&)>& edit) {
    const std::string before = read_file(folder / "config.json");
    edit_config(folder, edit);
    const std::string text = error_of([&] { read_hf_config(folder); });
    std::ofstream(folder / "config.json") << before;
    return text.substr(std::min(text.size(), (folder / "config.json").string().size()));
  };
  EXPECT_EQ(
      config_error([](ordered_json& json) { json["model_type"] = "mamba"; }),
      ": models of the type \"mamba\" are not known\nhint: types that are: " + hf_family_names() +
          "; convert-checkpoint --name-map reads others whose blocks are ours");
  EXPECT_EQ(config_error([](ordered_json& json) { json["hidden_act"] = "relu"; }),
            ": hidden_act \"relu\" is not built, only \"silu\"");
  EXPECT_EQ(config_error([](ordered_json& json) {
              json["rope_scaling"] = {{"type", "dynamic"}, {"factor", 2.0}};
            }),
            ": rotary positions of the type \"dynamic\" are not built"
            "\nhint: types that are: default, linear, llama3, yarn, longrope");
  EXPECT_EQ(config_error([](ordered_json& json) {
              json["rope_scaling"] = {{"type", "yarn"}, {"factor", 2.0}, {"mscale", 1.5}};
            }),
            ": rotary positions of the type \"yarn\" with mscale 1.5 are not built");
  EXPECT_EQ(config_error([](ordered_json& json) { json["attention_bias"] = true; }),
            ": attention_bias without mlp_bias, or the reverse, is not built");
  EXPECT_EQ(config_error([](ordered_json& json) { json.erase("hidden_size"); }),
            ": has no hidden_size");
  EXPECT_EQ(config_error([](ordered_json& json) { json["hidden_size"] = 3e9; }),
            ": hidden_size is 3000000000.0, expected 0 to 2147483647");
  EXPECT_EQ(config_error([](ordered_json& json) { json["num_hidden_layers"] = 1000000; }),
            ": num_hidden_layers is 1000000, expected 1 to 10000");
  EXPECT_EQ(config_error([](ordered_json& json) {
              json["model_type"] = "mistral";
              json["sliding_window"] = 0;
            }),
            ": a sliding_window of 0 tokens does not include the token itself");
  EXPECT_EQ(config_error([](ordered_json& json) { json["vocab_size"] = 0; }),
            ": vocab_size 0 is not positive");
  EXPECT_EQ(config_error([](ordered_json& json) { json["rope_scaling"] = "none"; }),
            ": rope_scaling is \"none\", expected an object");
  EXPECT_EQ(config_error([](ordered_json& json) {
              json["rope_scaling"] = {{"type", "llama3"}, {"factor", 2.0}};
            }),
            ": has no rope_parameters.low_freq_factor");
  EXPECT_EQ(config_error([](ordered_json& json) {
              json["rope_parameters"] = {{"full_attention", {{"rope_theta", 10.0}}}};
            }),
            ": rope_parameters of each type of layer are not built for this model");
  EXPECT_EQ(config_error([](ordered_json& json) { json["num_key_value_heads"] = 3; }),
            ": --num-attention-heads 4 is not divisible by --num-query-groups 3\n"
            "hint: groups that divide it: 1, 2, 4");
  EXPECT_EQ(config_error([](ordered_json& json) { json["num_hidden_layers"] = "two"; }),
            ": num_hidden_layers is \"two\", expected a whole number");
}

// Whatever a configuration holds, it is read or refused in our words.
TEST_F(HfConvert, BrokenConfigurationsAreRefusedInOurWords) {
  std::mt19937 random(7);
  int64_t refused = 0, read = 0;
  for (const char* name : {"llama3", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3", "gemma2",
                           "gemma3", "qwen2_moe", "deepseek_v3"}) {
    const std::string whole = read_file(golden(name) / "config.json");
    for (int i = 0; i < 300; ++i) {
      std::string text = whole;
      for (uint32_t changes = random() % 3 + 1; changes > 0; --changes) {
        const size_t at = random() % text.size();
        constexpr std::string_view kBytes = "0123456789-.e[]{}\",:nft \xff\0";
        if (random() % 2 == 0) {
          text[at] = kBytes[random() % kBytes.size()];
        } else {
          text.erase(at, random() % 9);
        }
      }
      try {
        const HfModel model = parse_hf_config(text, "config.json");
        hf_tensors(*model.family, model.config);
        ++read;
      } catch (const InternalError& error) {
        ADD_FAILURE() << error.what() << "\n" << text;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()), "");
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(read, 100);
}

TEST_F(HfConvert, WhichFoldersAreOfHuggingFace) {
  EXPECT_TRUE(is_hf_folder(golden("gpt2")));
  EXPECT_FALSE(is_hf_folder(root_));
  const fs::path before = fs::current_path();
  fs::current_path(golden("gpt2"));
  EXPECT_FALSE(is_hf_folder(fs::path())) << "no folder was named";
  fs::current_path(before);
  const ConvertResult result = import_hf_folder(golden("gpt2"), root_ / "ours");
  fs::copy_file(golden("gpt2") / "config.json", root_ / "ours" / "config.json");
  EXPECT_FALSE(is_hf_folder(root_ / "ours")) << "it holds checkpoints";
  EXPECT_FALSE(is_hf_folder(result.directory));
}

TEST_F(HfConvert, LayersByType) {
  const fs::path folder = copy("gemma2");
  const auto with_types = [&](const ordered_json& types) {
    edit_config(folder, [&](ordered_json& json) { json["layer_types"] = types; });
    std::string kinds;
    const std::string error = error_of([&] {
      const TransformerConfig t = read_hf_config(folder).config.transformer;
      for (int64_t layer = 1; layer <= 2; ++layer) kinds += t.window(layer).empty() ? 'f' : 'w';
    });
    return kinds.empty() ? error : kinds;
  };
  const std::string name = (folder / "config.json").string();
  EXPECT_EQ(with_types({"full_attention", "sliding_attention"}), "fw");
  EXPECT_EQ(with_types({"sliding_attention", "sliding_attention"}), "ww");
  EXPECT_EQ(with_types({"full_attention", "full_attention"}), "ff");
  EXPECT_EQ(with_types(ordered_json::array({"full_attention"})),
            name + ": layer_types names 1 layers, num_hidden_layers is 2");
  EXPECT_EQ(with_types({"chunked_attention", "full_attention"}),
            name + ": layers of the type \"chunked_attention\" are not built");
  EXPECT_EQ(with_types({1, 2}), name + ": layer_types is 1, expected a string");
}

TEST_F(HfConvert, ATokenizerThatCannotBeMadeIsNeededForPromptsOnly) {
  const fs::path folder = copy("mistral");
  std::ofstream(folder / "tokenizer.json") << R"({"model": {"type": "Unigram"}})";
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = folder;
  EXPECT_NE(error_of([&] { load_model(request, groups); }), "");
  request.tokenizer_required = false;
  const LoadedModel loaded = load_model(request, groups);
  ASSERT_EQ(loaded.warnings.size(), 1u);
  EXPECT_TRUE(loaded.warnings[0].starts_with("no tokenizer: ")) << loaded.warnings[0];
  EXPECT_EQ(loaded.tokenizer->vocab_size(), 40);
}

TEST_F(HfConvert, AFolderThatHoldsSomethingIsNotWrittenOver) {
  import_hf_folder(golden("mistral"), root_ / "ours");
  EXPECT_EQ(error_of([&] { import_hf_folder(golden("mistral"), root_ / "ours"); }),
            (root_ / "ours").string() + ": holds checkpoints already\nhint: give another --save");
  EXPECT_EQ(error_of([&] { export_hf_folder({root_ / "ours", {}, root_ / "ours", "", 1 << 20}); }),
            (root_ / "ours").string() + ": is not empty\nhint: give another --save");
}

// A checkpoint as `pretrain` writes it: without a folder it came from.
void save_native(const fs::path& root, TransformerConfig transformer) {
  transformer.finalize();
  ModelConfig config;
  config.transformer = transformer;
  config.vocab_size = config.padded_vocab_size = 10;
  const ParallelGroups groups;
  GPTModel model(config, groups);
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/false);
  SaveRequest save;
  save.root = root;
  save.iteration = 3;
  model.visit([&](const std::string& name, Parameter& parameter) {
    ShardedTensor tensor;
    tensor.key = name;
    tensor.global_shape = parameter.local_shape;
    tensor.data = parameter.value.data_ptr();
    save.tensors.push_back(tensor);
  });
  TokenizerConfig tokenizer;
  tokenizer.tokenizer_type = "NullTokenizer";
  tokenizer.vocab_size = 10;
  Config* const configs[] = {&transformer, &tokenizer};
  save.files.emplace_back("config.yaml", to_yaml(configs));
  save_checkpoint(save);
}

// A run keeps some values in fp32 beside bf16 ones; transformers saves all in the model's type.
class HfStatesOfARun : public HfConvert, public testing::WithParamInterface<std::string> {};

TEST_P(HfStatesOfARun, GoBackInTheirTypes) {
  const fs::path source = golden(GetParam());
  import_hf_folder(source, root_ / "imported");
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = root_ / "imported";
  const LoadedModel loaded = load_model(request, groups);
  const Checkpoint imported(find_checkpoints(root_ / "imported").at(0).directory);
  SaveRequest save;  // as a run does
  save.root = root_ / "run";
  save.iteration = 7;
  size_t kept = 0;
  loaded.model->visit([&](const std::string& name, Parameter& parameter) {
    ShardedTensor tensor = sharded_tensor(parameter, groups, name, parameter.value);
    kept += parameter.keeps_fp32;
    EXPECT_EQ(tensor.dtype, parameter.keeps_fp32 ? DType::kFloat32 : DType::kBFloat16) << name;
    save.tensors.push_back(std::move(tensor));
  });
  EXPECT_GT(kept, 0u);
  save.files = origin_files(imported);
  save.files.emplace_back("config.yaml", imported.read_file("config.yaml"));
  save_checkpoint(save);
  export_hf_folder({root_ / "run", {}, root_ / "theirs", "", 1 << 20});
  const Tensors before = read_folder(source), after = read_folder(root_ / "theirs");
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [name, tensor] : before) EXPECT_EQ(after.at(name), tensor) << name;

  // Training may leave values that bf16 has not; those of the files are the nearest.
  loaded.model->visit([&](const std::string&, Parameter& parameter) {
    if (parameter.keeps_fp32) parameter.value.mul_(1.001);
  });
  save.root = root_ / "trained";
  save_checkpoint(save);
  export_hf_folder({root_ / "trained", {}, root_ / "rounded", "", 1 << 20});
  LoadModelRequest back;
  back.load = root_ / "rounded";
  const LoadedModel again = load_model(back, groups);
  std::map<std::string, at::Tensor> values;
  loaded.model->visit([&](const std::string& name, Parameter& parameter) {
    values[name] = parameter.value.to(at::kBFloat16).to(parameter.value.scalar_type());
  });
  again.model->visit([&](const std::string& name, Parameter& parameter) {
    EXPECT_TRUE(at::equal(parameter.value, values.at(name))) << name;
  });
}

INSTANTIATE_TEST_SUITE_P(Families, HfStatesOfARun,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfStateGoldens),
                                                                    std::end(kHfStateGoldens))),
                         [](const auto& param) { return param.param; });

// Files that hold such values in fp32 are written as they were.
TEST_F(HfConvert, ConvertedValuesKeepTheirTypes) {
  const fs::path folder = copy("qwen3_5_text");
  Tensors tensors = read_folder(folder);
  for (auto& [name, tensor] : tensors)
    if (name.ends_with("A_log"))
      tensor = {DType::kFloat32, {4}, std::string("\0\0\x81?\1\0\0?\0\0@\xbf\7\0\0?", 16)};
  write_folder(folder, tensors);
  import_hf_folder(folder, root_ / "ours");
  export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20});
  EXPECT_EQ(read_folder(root_ / "theirs"), tensors);
}

TransformerConfig small() {
  TransformerConfig t;
  t.num_layers = 2;
  t.hidden_size = 8;
  t.num_attention_heads = 2;
  t.seq_length = 16;
  return t;
}

TEST_F(HfConvert, TheFamilyOfAModelOfOursIsFound) {
  save_native(root_ / "gpt", small());
  EXPECT_EQ(export_hf_folder({root_ / "gpt", {}, root_ / "gpt_hf", "", 1 << 20}).model_type,
            "gpt2");
  TransformerConfig t = small();
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.swiglu = true;
  t.untie_embeddings_and_output_weights = true;
  t.ffn_hidden_size = 12;
  t.rotary_seq_len_interpolation_factor = 2;
  save_native(root_ / "rope", t);
  const ConvertResult result =
      export_hf_folder({root_ / "rope", {}, root_ / "rope_hf", "", 1 << 20});
  EXPECT_EQ(result.model_type, "llama");
  EXPECT_EQ(result.iteration, 3);
  const ordered_json written = ordered_json::parse(read_file(root_ / "rope_hf" / "config.json"));
  EXPECT_EQ(written["dtype"], "float32");
  EXPECT_EQ(written["rope_parameters"]["rope_type"], "linear") << "positions that are divided";
  EXPECT_EQ(architecture_difference(t, read_hf_config(root_ / "rope_hf").config.transformer), "");
}

// What a run trains with and where it computes is not told to other programs.
TEST_F(HfConvert, OnlyTheArchitectureIsCompared) {
  const HfModel model = read_hf_config(golden("llama2"));
  ModelConfig trained = model.config;
  TransformerConfig& t = trained.transformer;
  t.hidden_dropout = 0.3;
  t.fp8_format = Fp8Format::kHybrid;
  t.first_last_layers_bf16 = true;
  t.fast = true;
  t.cross_entropy_fusion_impl = CrossEntropyFusion::kLinear;
  t.recompute_activations = true;
  t.fine_grained_activation_offloading = true;
  t.offload_modules = {"core_attn"};
  t.min_offloaded_tensor_size = 1;
  EXPECT_EQ(architecture_difference(model.config.transformer, t), "");
  EXPECT_EQ(write_hf_config(*model.family, trained, "{}"),
            write_hf_config(*model.family, model.config, "{}"));
  t.layernorm_epsilon = 0.5;
  const std::string difference = architecture_difference(t, model.config.transformer);
  EXPECT_TRUE(difference.starts_with("layernorm_epsilon is 0.5, not ")) << difference;
}

TEST_F(HfConvert, WhatAFamilyCannotSayIsNamed) {
  TransformerConfig t = small();
  t.position_embedding_type = PositionEmbedding::kRope;
  t.normalization = Normalization::kRMSNorm;
  t.add_bias_linear = false;
  t.swiglu = true;
  t.ffn_hidden_size = 12;
  t.rotary_interleaved = true;
  save_native(root_ / "ours", t);
  EXPECT_EQ(
      error_of([&] { export_hf_folder({root_ / "ours", {}, root_ / "theirs", "llama", 1 << 20}); }),
      "a llama model of Hugging Face cannot express this model: rotary_interleaved is true, not "
      "false");
  EXPECT_TRUE(
      error_of([&] { export_hf_folder({root_ / "ours", {}, root_ / "theirs", "", 1 << 20}); })
          .starts_with("no known Hugging Face model family can express this model\n"
                       "detail: a llama model of Hugging Face cannot express this model: "
                       "rotary_interleaved"));
  EXPECT_EQ(
      error_of([&] { export_hf_folder({root_ / "ours", {}, root_ / "theirs", "bart", 1 << 20}); }),
      "--hf-model-type bart is not known\nhint: types that are: " + hf_family_names());
  EXPECT_FALSE(fs::exists(root_ / "theirs"));
}

}  // namespace
}  // namespace megatron
