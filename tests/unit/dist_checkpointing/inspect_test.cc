// The inspect-checkpoint command.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "test_support.h"
#include "tools/commands.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

struct Outcome {
  int code;
  std::string output;
};

Outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "inspect-checkpoint");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  testing::internal::CaptureStdout();
  try {
    const int code = inspect_checkpoint(static_cast<int>(arguments.size()), argv.data());
    return {code, testing::internal::GetCapturedStdout()};
  } catch (const Error& error) {
    testing::internal::GetCapturedStdout();
    return {-1, error.what()};
  }
}

TEST(InspectCheckpoint, ShowsOneCheckpoint) {
  ScratchFolder folder;
  TinyModel model(1);
  const fs::path directory = save_checkpoint(request_for(model, folder.path(), 50)).directory;
  const Outcome text = run({directory.string(), "--verify"});
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.output, HasSubstr("iteration               50"));
  EXPECT_THAT(text.output, HasSubstr("state.consumed_samples  400"));
  EXPECT_THAT(text.output, HasSubstr("model.weight                    F32   [40,64]   10,240      1  rank_00000.safetensors"));
  EXPECT_THAT(text.output, HasSubstr("bytes are as they were written"));
  const Outcome json = run({directory.string(), "--json"});
  const auto root = nlohmann::json::parse(json.output);
  EXPECT_EQ(root.at("iteration"), 50);
  EXPECT_EQ(root.at("num_tensors"), 5);
  EXPECT_EQ(root.at("tensors").at("model.half").at("shape"), nlohmann::json({3, 167}));
  EXPECT_EQ(root.at("tensors").at("model.half").at("bytes"), 1002);
  EXPECT_EQ(root.at("state").at("iteration"), 50);
}

TEST(InspectCheckpoint, ShowsAFolderAndFindsDamage) {
  ScratchFolder folder;
  TinyModel model(1);
  save_checkpoint(request_for(model, folder.path(), 50));
  const fs::path second = save_checkpoint(request_for(model, folder.path(), 60)).directory;
  EXPECT_EQ(run({folder.path().string(), "--verify"}).code, 0);
  flip_bit(second / "rank_00000.safetensors", 8 * 9000);
  EXPECT_EQ(run({folder.path().string()}).code, 0);  // the manifest alone is whole
  const Outcome text = run({folder.path().string(), "--verify"});
  EXPECT_EQ(text.code, 1);
  EXPECT_THAT(text.output, HasSubstr("iter_0000060"));
  EXPECT_THAT(text.output, HasSubstr("DAMAGED: " + second.string() + "/rank_00000.safetensors: the checksum of bytes"));
  const auto root = nlohmann::json::parse(run({folder.path().string(), "--verify", "--json"}).output);
  EXPECT_EQ(root.at("checkpoints").at(0).at("usable"), false);
  EXPECT_EQ(root.at("checkpoints").at(1).at("usable"), true);
  EXPECT_THAT(run({second.string(), "--verify"}).output, HasSubstr("the checksum of bytes"));
  EXPECT_EQ(nlohmann::json::parse(run({second.string(), "--verify", "--json"}).output).at("verified"), false);
}

TEST(InspectCheckpoint, SaysWhatIsMissing) {
  ScratchFolder folder;
  EXPECT_THAT(run({}).output, HasSubstr("needs a folder"));
  EXPECT_THAT(run({folder.path().string()}).output, HasSubstr("holds no checkpoint and is none"));
  EXPECT_THAT(run({(folder.path() / "x").string()}).output, HasSubstr("is not a folder"));
  EXPECT_THAT(run({"--help"}).output, HasSubstr("--verify"));
}

}  // namespace
}  // namespace megatron
