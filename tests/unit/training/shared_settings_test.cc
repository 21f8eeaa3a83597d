#include "megatron/runtime/shared_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "megatron/base/field_info.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {
namespace {

using testing::HasSubstr;

class SharedSettings : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              cat("shared_settings_", ::getpid(), "_",
                  testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  std::filesystem::path folder_;
};

std::string value_of(const RankSettings& settings, const std::string& name) {
  const auto at = std::find_if(settings.begin(), settings.end(),
                               [&](const RankSetting& s) { return s.name == name; });
  return at == settings.end() ? "(not compared)" : at->value;
}

TEST_F(SharedSettings, HoldEveryFlagButThoseThatMayDiffer) {
  Arguments arguments;
  const RankSettings settings = shared_settings(arguments.configs());
  std::set<std::string> compared, left_out;
  for (const RankSetting& setting : settings) compared.insert(setting.name);
  for (const FieldInfo& field : describe_fields(arguments.configs()))
    if (!compared.contains(field.flags[0])) left_out.insert(field.flags[0]);
  EXPECT_THAT(left_out, testing::UnorderedElementsAre(
                            "--data-cache-path", "--distributed-interface",
                            "--num-dataset-builder-threads", "--num-threads", "--num-workers"));
  arguments.optimizer.lr = 0.25;
  EXPECT_NE(digest(shared_settings(arguments.configs())), digest(settings));
  EXPECT_EQ(value_of(shared_settings(arguments.configs()), "--lr"), "0.25");
}

TEST_F(SharedSettings, KnowEveryFlagThatNamesAFile) {
  // Paths whose contents are not compared: folders of checkpoints, which the ranks verify when they
  // read them.
  const std::set<std::string> only_the_path = {"adapter",
                                               "load",
                                               "pretrained_audio_model",
                                               "pretrained_checkpoint",
                                               "pretrained_vision_model",
                                               "save"};
  Arguments arguments;
  for (const FieldInfo& field : describe_fields(arguments.configs())) {
    if (field.kind != FieldKind::kString && field.kind != FieldKind::kStringList) continue;
    static const std::regex kNamesAFile(
        "path|file$|folder|dir$|_model$|template|^load$|^save$|adapter$|checkpoint$");
    if (!std::regex_search(field.name, kNamesAFile)) continue;
    EXPECT_TRUE(field_sharing(field.name) != FieldSharing::kSame ||
                only_the_path.contains(field.name))
        << field.name << ": list it in shared_settings.cc, as contents to compare or as local";
  }
}

TEST_F(SharedSettings, CompareFoldersOfTheFirstRankByWhetherTheyAreGiven) {
  Arguments arguments;
  EXPECT_EQ(value_of(shared_settings(arguments.configs()), "--run-dir"), "");
  arguments.training.run_dir = "/local/rank0";
  const std::string one = digest(shared_settings(arguments.configs()));
  arguments.training.run_dir = "/local/rank1";
  EXPECT_EQ(digest(shared_settings(arguments.configs())), one);
}

TEST_F(SharedSettings, SeeTheContentsOfFiles) {
  const std::string small = write("vocab.json", "{}");
  const std::string before = contents_fingerprint(small, false);
  EXPECT_THAT(before, HasSubstr("2 bytes, contents "));
  write("vocab.json", "[]");
  EXPECT_NE(contents_fingerprint(small, false), before);
  EXPECT_EQ(contents_fingerprint((folder_ / "none").string(), false), "no such file");

  // A data set is named by its prefix; of large files some blocks are read, the first and the last
  // among them.
  std::string data(3 << 20, 'x');
  write("data.idx", "index");
  write("data.bin", data);
  const std::string prefix = (folder_ / "data").string();
  const std::string whole = contents_fingerprint(prefix, false),
                    less = contents_fingerprint(prefix, true);
  EXPECT_THAT(whole, HasSubstr(cat((3 << 20) + 5, " bytes")));
  data.back() = 'y';
  write("data.bin", data);
  EXPECT_NE(contents_fingerprint(prefix, false), whole);
  EXPECT_NE(contents_fingerprint(prefix, true), less);

  // A folder stands for the files of its tokenizer, not for weights.
  const std::string folder = folder_.string();
  const std::string tokenizer = contents_fingerprint(folder, false);
  write("model.safetensors", "weights");
  EXPECT_EQ(contents_fingerprint(folder, false), tokenizer);
  write("tokenizer.json", "{}");
  EXPECT_NE(contents_fingerprint(folder, false), tokenizer);
}

TEST_F(SharedSettings, SeeTheFilesThatFlagsName) {
  Arguments arguments;
  arguments.data.data_path = {"0.25", write("a.bin", "1"), "0.75", write("b.bin", "2")};
  arguments.data.data_path[1].resize(arguments.data.data_path[1].size() - 4);
  arguments.data.data_path[3].resize(arguments.data.data_path[3].size() - 4);
  const RankSettings settings = shared_settings(arguments.configs());
  EXPECT_THAT(value_of(settings, cat("--data-path ", arguments.data.data_path[3])),
              HasSubstr("1 bytes, contents"));
  EXPECT_EQ(value_of(settings, "--data-path 0.25"), "(not compared)");
}

}  // namespace
}  // namespace megatron
