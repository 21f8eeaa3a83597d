// The type of the model in checkpoints: written only if it is not gpt, read by whoever loads.
#include <gtest/gtest.h>

#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/import_weights.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/model_table.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

class StoredModelType : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) /
            cat("model_type.", testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // A checkpoint without tensors, whose config.yaml is that of a model of this type.
  Checkpoint stored(const std::string& type) {
    ModelConfig config;
    config.type = type;
    SaveRequest save;
    save.root = root_;
    save.iteration = ++iteration_;
    save.files = {{"config.yaml", model_yaml(config, {})}};
    return Checkpoint(save_checkpoint(save).directory);
  }

  std::filesystem::path root_;
  int64_t iteration_ = 0;
};

TEST_F(StoredModelType, IsWrittenUnlessItIsGpt) {
  EXPECT_EQ(model_type_yaml("gpt"), "");
  EXPECT_EQ(model_type_yaml("other"), "# model\nmodel_type: other\n");
  EXPECT_EQ(stored("gpt").read_file("config.yaml").find("model_type"), std::string::npos);
  EXPECT_TRUE(stored("other").read_file("config.yaml").starts_with("# model\nmodel_type: other\n"));
}

struct Flags : Config {
  int64_t num_eyes = 2;
  void fields(FieldVisitor& visitor) override {
    visitor.group("eyes");
    visitor.field("num_eyes", num_eyes, "eyes");
  }
};

TEST_F(StoredModelType, HasItsOwnFlags) {
  ModelConfig config;
  EXPECT_EQ(model_yaml(config, {}).find("num_eyes"), std::string::npos);
  Flags flags;
  flags.num_eyes = 3;
  config.own = OwnConfig(flags);
  const ModelConfig copy = config;
  config.own.as<Flags>()->num_eyes = 4;
  EXPECT_EQ(copy.own.as<Flags>()->num_eyes, 3);
  EXPECT_EQ(copy.own.as<TransformerConfig>(), nullptr);
  EXPECT_NE(model_yaml(copy, {}).find("num_eyes: 3\n"), std::string::npos);
}

TEST_F(StoredModelType, IsReadByWhoeverLoads) {
  const Checkpoint gpt = stored("gpt");
  EXPECT_EQ(stored_model_type(gpt), "gpt");
  EXPECT_EQ(read_stored_config(gpt).model.type, "gpt");
  EXPECT_EQ(error_of([&] { check_model_type(gpt, "gpt"); }), "");
  EXPECT_EQ(error_of([&] { check_model_type(gpt, "other"); }),
            gpt.directory().string() + ": holds a model of type gpt, expected one of type other");
}

TEST_F(StoredModelType, AnUnknownOneIsRefused) {
  const Checkpoint checkpoint = stored("other");
  const std::string message =
      (checkpoint.directory() / "config.yaml").string() +
      ": a model of type other is unknown\nhint: known types: gpt, bert, t5, retro, mimo";
  EXPECT_EQ(error_of([&] { stored_model_type(checkpoint); }), message);
  EXPECT_EQ(error_of([&] { check_model_type(checkpoint, "gpt"); }), message);
  LoadModelRequest request;
  request.load = root_;
  EXPECT_EQ(error_of([&] { open_model(request); }), message);
}

// The families of Hugging Face are those of one type each.
TEST_F(StoredModelType, OfAHuggingFaceFolderIsThatOfItsFamily) {
  const HfFolder folder = open_hf_folder(MEGATRON_SOURCE_DIR "/tests/golden/hf/llama2");
  EXPECT_EQ(folder.model.config.type, "gpt");
  EXPECT_EQ(stored_model_type(folder.checkpoint), "gpt");
  EXPECT_EQ(error_of([&] { check_model_type(folder.checkpoint, "other"); }),
            folder.checkpoint.directory().string() +
                ": holds a model of type gpt, expected one of type other");
  ModelConfig config = folder.model.config;
  const Checkpoint checkpoint = stored("gpt");
  EXPECT_EQ(family_of_model(checkpoint, config).model_type, "llama");
  config.type = "other";
  EXPECT_NE(error_of([&] {
              family_of_model(checkpoint, config);
            }).find("no Hugging Face model family can express this model"),
            std::string::npos);
}

}  // namespace
}  // namespace megatron
