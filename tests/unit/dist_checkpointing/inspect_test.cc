// The inspect-checkpoint command.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/ownership.h"
#include "test_support.h"

namespace megatron {

int inspect_checkpoint(int argc, char** argv);  // tools/commands/inspect_checkpoint.cc

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
  EXPECT_THAT(
      text.output,
      HasSubstr(
          "model.weight                    F32   [40,64]   10,240      1  rank_00000.safetensors"));
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
  EXPECT_THAT(text.output, HasSubstr("DAMAGED: " + second.string() +
                                     "/rank_00000.safetensors: the checksum of bytes"));
  const auto root =
      nlohmann::json::parse(run({folder.path().string(), "--verify", "--json"}).output);
  EXPECT_EQ(root.at("checkpoints").at(0).at("usable"), false);
  EXPECT_EQ(root.at("checkpoints").at(1).at("usable"), true);
  EXPECT_THAT(run({second.string(), "--verify"}).output, HasSubstr("the checksum of bytes"));
  EXPECT_EQ(
      nlohmann::json::parse(run({second.string(), "--verify", "--json"}).output).at("verified"),
      false);
}

TEST(InspectCheckpoint, ShowsAndSweepsLeftovers) {
  ScratchFolder folder;
  const fs::path root = folder.path();
  TinyModel model(1);
  save_checkpoint(request_for(model, root, 50));
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  ::waitpid(dead, nullptr, 0);
  const auto an_hour_ago = fs::file_time_type::clock::now() - std::chrono::minutes(61);
  // Of this process, alive; of one that is gone; of another machine, fresh and old; set aside; a
  // file that was being replaced, now and long ago; and what is nobody's to remove.
  const fs::path own = temporary_path(root / "iter_0000060");
  fs::create_directory(own);
  std::string gone = own.filename().string();
  gone.replace(gone.find(cat("-", ::getpid(), "-")) + 1, std::to_string(::getpid()).size(),
               std::to_string(dead));
  fs::create_directory(root / gone);
  spill(root / gone / "rank_00000.safetensors", std::string(1000, 'x'));
  fs::create_directory(root / "iter_0000070.tmp-elsewhere-1-1-0");
  fs::create_directory(root / "iter_0000080.tmp-elsewhere-1-1-0");
  fs::last_write_time(root / "iter_0000080.tmp-elsewhere-1-1-0",
                      an_hour_ago - std::chrono::hours(24));
  fs::create_directory(root / "iter_0000040.unusable-0");
  spill(root / cat("config.yaml.tmp-", dead, "-0"), "x");
  spill(root / cat("config.yaml.tmp-", dead, "-1"), "x");
  fs::last_write_time(root / cat("config.yaml.tmp-", dead, "-1"), an_hour_ago);
  spill(root / "notes.tmp-of-mine", "x");
  fs::create_directory(root / "mine.unusable-0");
  const Outcome shown = run({root.string()});
  EXPECT_EQ(shown.code, 0);
  EXPECT_THAT(shown.output, HasSubstr(gone + " "));
  EXPECT_THAT(shown.output, HasSubstr(cat("1,000")));
  EXPECT_THAT(shown.output, HasSubstr(", alive\n"));
  EXPECT_THAT(shown.output, HasSubstr(cat("process ", dead, " on ")));
  EXPECT_THAT(shown.output, HasSubstr("process 1 on elsewhere, which may be alive"));
  EXPECT_THAT(shown.output, HasSubstr("set aside by a save"));
  EXPECT_THAT(shown.output, HasSubstr("--sweep"));
  EXPECT_EQ(nlohmann::json::parse(run({root.string(), "--json"}).output).at("leftovers").size(),
            7u);
  EXPECT_THAT(run({(root / "iter_0000050").string(), "--sweep"}).output,
              HasSubstr("--sweep takes the folder of the checkpoints"));
  // A directory of another machine whose writer holds its lock is not taken for a dead one, however
  // old.
  {
    const DirectoryLock lock(root / "iter_0000080.tmp-elsewhere-1-1-0");
    EXPECT_THAT(run({root.string(), "--json"}).output, HasSubstr("process 1 on elsewhere, alive"));
  }
  const Outcome swept = run({root.string(), "--sweep"});
  EXPECT_EQ(swept.code, 0);
  EXPECT_THAT(swept.output, HasSubstr("; removed"));
  EXPECT_THAT(names_in(root),
              testing::UnorderedElementsAre("iter_0000050", kLatestName, own.filename().string(),
                                            "iter_0000070.tmp-elsewhere-1-1-0",
                                            cat("config.yaml.tmp-", dead, "-0"),
                                            "notes.tmp-of-mine", "mine.unusable-0"));
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
