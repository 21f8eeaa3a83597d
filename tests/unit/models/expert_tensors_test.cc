// Foreign tensors of experts, to and from ours: one file tensor for every expert of a layer where
// ours holds them all, [experts, rows, columns], or one each, too; by the rows of a Hugging Face
// family, and by a map of names. The model is none of the table's: it is given by the names and
// shapes of its parameters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/interop/huggingface/hf_families.h"
#include "megatron/interop/name_map.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using Named = std::map<std::string, at::Tensor>;

constexpr int64_t kExpertLayers = 2, kNumExperts = 3;

TransformerConfig toy_config() {
  TransformerConfig config;
  config.num_layers = kExpertLayers;
  config.hidden_size = 4;
  config.num_attention_heads = 1;
  config.finalize();
  return config;
}

const ParameterShapes& toy_parameters() {
  static const ParameterShapes shapes = [] {
    ParameterShapes all = {{"embedding.word_embeddings.weight", {6, 4}}};
    for (int64_t i = 0; i < kExpertLayers; ++i) {
      const std::string mlp = cat("decoder.layers.", i, ".mlp.");
      all.emplace_back(mlp + "router.weight", std::vector<int64_t>{kNumExperts, 4});
      all.emplace_back(mlp + "experts.fc1.weight", std::vector<int64_t>{kNumExperts, 10, 4});
      all.emplace_back(mlp + "experts.fc1.bias", std::vector<int64_t>{kNumExperts, 10});
      all.emplace_back(mlp + "experts.fc2.weight", std::vector<int64_t>{kNumExperts, 4, 5});
      all.emplace_back(mlp + "shared.weight", std::vector<int64_t>{2, 3, 4});
      all.emplace_back(mlp + "five.weight", std::vector<int64_t>{15, 4});
      for (int64_t e = 0; e < kNumExperts; ++e)
        all.emplace_back(cat(mlp, "experts.", e, ".own.weight"), std::vector<int64_t>{4, 4});
    }
    return all;
  }();
  return shapes;
}

const HfFamily& toy_family() {
  static const HfRow rows[] = {
      {"embedding.word_embeddings.weight", {"model.embed.weight"}},
      {"decoder.layers.*.mlp.router.weight", {"model.layers.*.router.weight"}},
      {".mlp.experts.fc1.@", {".experts.*.gate.@", ".experts.*.up.@"}, HfLayout::kStacked},
      {"decoder.layers.*.mlp.experts.fc2.weight",
       {"model.layers.*.experts.*.down.weight"},
       HfLayout::kSame,
       true},
      {"decoder.layers.*.mlp.shared.weight", {"model.layers.*.shared.weight"}},
      {"decoder.layers.*.mlp.five.weight",
       {"model.layers.*.five.a", "model.layers.*.five.b", "model.layers.*.five.c",
        "model.layers.*.five.d", "model.layers.*.five.e"},
       HfLayout::kStacked},
      {"decoder.layers.*.mlp.experts.*.own.weight", {"model.layers.*.experts.*.own.weight"}},
  };
  static const HfFamily family = {
      "toy", "ToyForCausalLM", {rows}, [](TransformerConfig&) {}, /*fields=*/nullptr};
  return family;
}

const Named& toy_weights() {
  static const Named weights = [] {
    Named all;
    double next = 0.0;
    for (const auto& [name, shape] : toy_parameters()) {
      all[name] = at::arange(next, next + c10::multiply_integers(shape), at::kFloat).view(shape);
      next += 1000.0;
    }
    return all;
  }();
  return weights;
}

// The toy's files, computed without the table.
Named foreign_weights() {
  Named theirs;
  const Named& ours = toy_weights();
  theirs["model.embed.weight"] = ours.at("embedding.word_embeddings.weight");
  for (int64_t i = 0; i < kExpertLayers; ++i) {
    const std::string layer = cat("model.layers.", i, "."),
                      mlp = cat("decoder.layers.", i, ".mlp.");
    theirs[layer + "router.weight"] = ours.at(mlp + "router.weight");
    theirs[layer + "shared.weight"] = ours.at(mlp + "shared.weight");
    for (int64_t k = 0; k < 5; ++k)
      theirs[cat(layer, "five.", "abcde"[k])] = ours.at(mlp + "five.weight").narrow(0, 3 * k, 3);
    for (int64_t e = 0; e < kNumExperts; ++e) {
      const std::string expert = cat(layer, "experts.", e, ".");
      const at::Tensor fc1 = ours.at(mlp + "experts.fc1.weight")[e];
      const at::Tensor bias = ours.at(mlp + "experts.fc1.bias")[e];
      theirs[expert + "gate.weight"] = fc1.narrow(0, 0, 5);
      theirs[expert + "up.weight"] = fc1.narrow(0, 5, 5);
      theirs[expert + "gate.bias"] = bias.narrow(0, 0, 5);
      theirs[expert + "up.bias"] = bias.narrow(0, 5, 5);
      theirs[expert + "down.weight"] = ours.at(mlp + "experts.fc2.weight")[e].t().contiguous();
      theirs[expert + "own.weight"] = ours.at(cat(mlp, "experts.", e, ".own.weight"));
    }
  }
  return theirs;
}

ShardedTensor described(const std::string& name, const at::Tensor& tensor) {
  ShardedTensor out;
  out.key = name;
  out.global_shape = tensor.sizes().vec();
  out.data = tensor.data_ptr();
  return out;
}

// Every parameter of the toy is in the checkpoint, whole and in parts.
void expect_toy(const Checkpoint& checkpoint) {
  EXPECT_EQ(checkpoint.manifest().tensors.size(), toy_parameters().size());
  for (const auto& [name, expected] : toy_weights()) {
    const at::Tensor whole = at::zeros_like(expected);
    load_one(checkpoint, described(name, whole));
    EXPECT_TRUE(at::equal(whole, expected)) << name;
    if (expected.dim() < 3) continue;
    // As a rank that holds the last two of the first dimension, and the middle of the others
    std::vector<int64_t> begin, size;
    at::Tensor part = expected;
    for (int64_t d = 0; d < expected.dim(); ++d) {
      begin.push_back(d == 0 ? expected.size(0) - 2 : 1);
      size.push_back(d == 0 ? 2 : expected.size(d) - 2);
      part = part.narrow(d, begin.back(), size.back());
    }
    const at::Tensor mine = at::zeros(size);
    ShardedTensor wanted = described(name, mine);
    wanted.global_shape = expected.sizes().vec();
    wanted.local_shape = size;
    wanted.pieces = {{{begin, size}, {0, 0, 0}}};
    load_one(checkpoint, wanted);
    EXPECT_TRUE(at::equal(mine, part)) << name << ": a part";
  }
}

class ExpertTensors : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) /
            cat("experts.", testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_ / "theirs");
    theirs_ = foreign_weights();
    std::vector<SafetensorsTensor> list;
    for (auto& [name, tensor] : theirs_) {
      tensor = tensor.contiguous();
      list.push_back({name, DType::kFloat32, tensor.sizes().vec(), tensor.data_ptr()});
    }
    write_safetensors(root_ / "theirs" / "weights.safetensors", list);
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path root_;
  Named theirs_;
};

TEST_F(ExpertTensors, RowsWithTwoIndicesRead) {
  const std::vector<HfTensor> tensors = hf_tensors(toy_family(), toy_config(), toy_parameters());
  const TensorFiles files = TensorFiles::of_path(root_ / "theirs");
  ASSERT_EQ(tensors.size(), files.places().size());
  ForeignManifest manifest("toy");
  manifest.set_files(files.stored());
  for (const HfTensor& tensor : tensors) {
    const auto place = files.places().find(tensor.name);
    ASSERT_NE(place, files.places().end()) << tensor.name;
    EXPECT_EQ(place->second.entry->shape, tensor.shape) << tensor.name;
    manifest.add_rows(tensor.ours, tensor.our_shape, place->second, view_of(tensor), tensor.runs,
                      /*first_column=*/0, tensor.expert);
  }
  expect_toy(std::move(manifest).open(files.folder()));
}

TEST_F(ExpertTensors, RowsWithTwoIndicesWrite) {
  SaveRequest save;
  save.root = root_ / "ours";
  save.iteration = 1;
  for (const auto& [name, tensor] : toy_weights()) save.tensors.push_back(described(name, tensor));
  const Checkpoint checkpoint(save_checkpoint(save).directory);
  for (const HfTensor& tensor : hf_tensors(toy_family(), toy_config(), toy_parameters())) {
    ShardedTensor part = part_of_ours(tensor, DType::kFloat32);
    at::Tensor made = at::zeros(part.local_shape);
    part.data = made.data_ptr();
    load_one(checkpoint, part);
    if (tensor.expert >= 0) made = made[0];
    if (tensor.transposed) made = made.t();
    EXPECT_TRUE(at::equal(made, theirs_.at(tensor.name))) << tensor.name;
  }
}

TEST_F(ExpertTensors, NamesAreInMessagesAndInPatterns) {
  const std::vector<int64_t> indices = {1, 22};
  EXPECT_EQ(indices_of("l.*.e.*.w", "l.1.e.22.w"), indices);
  EXPECT_EQ(indices_of("l.*.e.*.w", "l.1.e.w"), std::nullopt);
  EXPECT_EQ(indices_of("l.*.e.*", "l.1.e."), std::nullopt);
  EXPECT_EQ(indices_of("plain", "plain"), std::vector<int64_t>());
  EXPECT_EQ(indices_of("plain", "plains"), std::nullopt);
  EXPECT_EQ(with_indices("l.*.e.*.w", indices), "l.1.e.22.w");
  EXPECT_THROW(with_indices("a.*.b.*.c.*", indices), InternalError);
  ParameterShapes more = toy_parameters();
  more.emplace_back("decoder.layers.1.mlp.experts.2.other.weight", std::vector<int64_t>{4, 4});
  try {
    hf_tensors(toy_family(), toy_config(), more);
    ADD_FAILURE() << "found";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "a toy model of Hugging Face has no tensor for "
                 "decoder.layers.1.mlp.experts.2.other.weight");
  }
}

constexpr const char* kToyMap = R"(
parameters:
  embedding.word_embeddings.weight: model.embed.weight
  "decoder.layers.{layer}.mlp.router.weight": "model.layers.{layer}.router.weight"
  "decoder.layers.{layer}.mlp.experts.fc1.weight":
    concat: ["model.layers.{layer}.experts.{expert}.gate.weight",
             "model.layers.{layer}.experts.{expert}.up.weight"]
  "decoder.layers.{layer}.mlp.experts.fc1.bias":
    concat: ["model.layers.{layer}.experts.{expert}.gate.bias",
             "model.layers.{layer}.experts.{expert}.up.bias"]
  "decoder.layers.{layer}.mlp.experts.fc2.weight":
    {name: "model.layers.{layer}.experts.{expert}.down.weight", transpose: true}
  "decoder.layers.{layer}.mlp.shared.weight":
    {name: "model.layers.{layer}.shared.weight", slice: "{expert}, :, :"}
  "decoder.layers.{layer}.mlp.five.weight":
    concat: ["model.layers.{layer}.five.a", "model.layers.{layer}.five.b",
             "model.layers.{layer}.five.c", "model.layers.{layer}.five.d",
             "model.layers.{layer}.five.e"]
  "decoder.layers.{layer}.mlp.experts.{expert}.own.weight":
    {name: "model.layers.{layer}.experts.{expert}.own.weight"}
)";

TEST_F(ExpertTensors, AMapOfNamesHasTwoIndices) {
  std::ofstream(root_ / "map.yaml") << kToyMap;
  const auto open = [&] {
    return open_mapped_model(root_ / "theirs", root_ / "map.yaml", toy_config(), {},
                             toy_parameters());
  };
  expect_toy(open().checkpoint);
  const std::string map = kToyMap;
  const std::string own = "experts.{expert}.own.weight\":";
  std::string wrong = map;
  wrong.replace(wrong.find(own), own.size(), "experts.{expert}.owm.weight\":");
  std::ofstream(root_ / "map.yaml") << wrong;
  try {
    open();
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("has no entry for decoder.layers.0.mlp.experts.0.own."));
    EXPECT_THAT(error.what(),
                HasSubstr("did you mean decoder.layers.{layer}.mlp.experts.{expert}.own.weight"));
  }
}

}  // namespace
}  // namespace megatron
