// The folder of checkpoints: listing, where to start, retention, leftovers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/ownership.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

class Folder : public testing::Test {
 protected:
  SaveResult save(int64_t iteration, const Retention& retention = {}) {
    TinyModel model(static_cast<uint64_t>(iteration));
    SaveRequest request = request_for(model, root_, iteration);
    request.retention = retention;
    return save_checkpoint(request);
  }
  std::vector<int64_t> iterations() const {
    std::vector<int64_t> found;
    for (const CheckpointEntry& entry : find_checkpoints(root_)) found.push_back(entry.iteration);
    return found;
  }
  StartRequest resume(StartMode mode = StartMode::kResume) const {
    return {mode, root_, root_, {}, false};
  }
  void damage(int64_t iteration) {
    flip_bit(root_ / checkpoint_name(iteration) / "rank_00000.safetensors", 8 * 9000);
  }

  ScratchFolder folder_;
  fs::path root_ = folder_.path() / "run";
};

TEST_F(Folder, ListsNewestFirstWithProblems) {
  EXPECT_TRUE(find_checkpoints(root_).empty());
  EXPECT_EQ(read_latest_hint(root_), std::nullopt);
  for (int64_t iteration : {5, 20, 10000000}) save(iteration);
  fs::create_directory(root_ / "iter_0000030");
  fs::create_directory(root_ / "iter_30");  // not our name
  damage(20);
  const std::vector<CheckpointEntry> quick = find_checkpoints(root_),
                                     full = find_checkpoints(root_, CheckDepth::kFull);
  ASSERT_EQ(quick.size(), 4u);
  EXPECT_EQ(quick[0].directory, root_ / "iter_10000000");
  EXPECT_EQ(quick[1].iteration, 30);
  EXPECT_THAT(quick[1].problem, HasSubstr("iter_0000030: has no manifest.json"));
  EXPECT_EQ(quick[2].problem, "");
  EXPECT_THAT(full[2].problem,
              HasSubstr("iter_0000020/rank_00000.safetensors: the checksum of bytes"));
  EXPECT_EQ(full[3].problem, "");
  spill(root_ / kLatestName, "release\n");
  EXPECT_EQ(read_latest_hint(root_), std::nullopt);
}

TEST_F(Folder, FreshRefusesToWriteAmongCheckpoints) {
  StartRequest request{StartMode::kFresh, {}, root_, {}, false};
  EXPECT_FALSE(resolve_start(request).checkpoint);
  save(5);
  EXPECT_THAT(error_of([&] { resolve_start(request); }),
              HasSubstr("holds checkpoints already (newest iter_0000005)"));
  request.allow_existing = true;
  EXPECT_FALSE(resolve_start(request).checkpoint);
}

TEST_F(Folder, ResumeNeedsAUsableCheckpoint) {
  EXPECT_THAT(error_of([&] { resolve_start({StartMode::kResume, {}, {}, {}, false}); }),
              HasSubstr("needs --load"));
  EXPECT_THAT(error_of([&] { resolve_start(resume()); }),
              HasSubstr("there is no such folder to resume from"));
  EXPECT_FALSE(resolve_start(resume(StartMode::kResumeOrFresh)).checkpoint);
  fs::create_directory(root_);
  EXPECT_THAT(error_of([&] { resolve_start(resume()); }), HasSubstr("holds no checkpoint"));
  EXPECT_FALSE(resolve_start(resume(StartMode::kResumeOrFresh)).checkpoint);
  save(5);
  save(10);
  EXPECT_EQ(resolve_start(resume()).checkpoint->iteration, 10);
  EXPECT_EQ(resolve_start(resume(StartMode::kResumeOrFresh)).checkpoint->iteration, 10);
  damage(10);
  const StartDecision decision = resolve_start(resume());
  EXPECT_EQ(decision.checkpoint->iteration, 5);
  ASSERT_EQ(decision.warnings.size(), 1u);
  EXPECT_THAT(decision.warnings[0], HasSubstr("iter_0000010/rank_00000.safetensors: the checksum"));
  damage(5);
  for (StartMode mode : {StartMode::kResume, StartMode::kResumeOrFresh}) {
    const std::string error = error_of([&] { resolve_start(resume(mode)); });
    EXPECT_THAT(error, HasSubstr("every checkpoint in it is damaged"));
    EXPECT_THAT(error, HasSubstr("detail: " + (root_ / "iter_0000005").string()));
  }
  spill(folder_.path() / "file", "");
  EXPECT_THAT(error_of([&] {
                resolve_start({StartMode::kResumeOrFresh, folder_.path() / "file", {}, {}, false});
              }),
              HasSubstr("is not a folder"));
}

TEST_F(Folder, CkptStepTakesThatOneAndNoOther) {
  save(5);
  save(10);
  StartRequest request = resume(StartMode::kResumeOrFresh);
  request.ckpt_step = 5;
  EXPECT_EQ(resolve_start(request).checkpoint->iteration, 5);
  request.ckpt_step = 7;
  EXPECT_THAT(error_of([&] { resolve_start(request); }),
              HasSubstr("has no checkpoint of --ckpt-step 7\nhint: there are 10, 5"));
  damage(5);
  request.ckpt_step = 5;
  EXPECT_THAT(error_of([&] { resolve_start(request); }),
              HasSubstr("the checkpoint of --ckpt-step 5 is damaged"));
}

TEST_F(Folder, OneCheckpointMayBeNamedDirectly) {
  save(5);
  save(10);
  for (const char* name : {"iter_0000005", "iter_0000005/"})
    EXPECT_EQ(
        resolve_start({StartMode::kResume, root_ / name, {}, {}, false}).checkpoint->iteration, 5);
}

TEST_F(Folder, RetainIntervalDeletesThePreviousUnlessAMultiple) {
  Retention retention;
  retention.retain_interval = 20;
  for (int64_t iteration = 5; iteration <= 45; iteration += 5) save(iteration, retention);
  EXPECT_THAT(iterations(), ElementsAre(45, 40, 20));
}

TEST_F(Folder, KeepLastKeepsTheNewestAndMultiples) {
  Retention retention;
  retention.keep_last = 2;
  for (int64_t iteration = 1; iteration <= 5; ++iteration) save(iteration);
  save(6, retention);
  EXPECT_THAT(iterations(), ElementsAre(6, 5));
  retention.retain_interval = 3;
  for (int64_t iteration = 7; iteration <= 10; ++iteration) save(iteration, retention);
  EXPECT_THAT(iterations(), ElementsAre(10, 9, 6));
  retention.keep_last = 1;
  save(11, retention);
  EXPECT_THAT(iterations(), ElementsAre(11, 9, 6));
}

TEST_F(Folder, RetentionSparesWhatIsDamaged) {
  for (int64_t iteration : {1, 2, 3}) save(iteration);
  spill(root_ / "iter_0000001" / "manifest.json", "cut");
  Retention retention;
  retention.keep_last = 1;
  EXPECT_TRUE(apply_retention(root_, 3, retention).empty());
  EXPECT_THAT(iterations(), ElementsAre(3, 1));
}

// What was saved was read back by its writer: deleting older ones looks at manifests and sizes and
// opens no other file.
TEST_F(Folder, RetentionReadsNoTensorFile) {
  for (int64_t iteration : {1, 2, 3}) save(iteration);
  std::vector<std::string> opened;
  bool published = false;
  Retention retention;
  retention.keep_last = 1;
  set_io_hook([&](IoOp op, const fs::path& path, const fs::path& to) {
    published |= op == IoOp::kRename && to.filename() == "iter_0000004";
    if (published && op == IoOp::kRead) opened.push_back(path.filename().string());
    return 0;
  });
  const SaveResult result = save(4, retention);
  set_io_hook({});
  EXPECT_TRUE(result.warnings.empty());
  EXPECT_THAT(iterations(), ElementsAre(4));
  EXPECT_FALSE(opened.empty());
  for (const std::string& name : opened) EXPECT_EQ(name, "manifest.json");
}

TEST_F(Folder, LeftoversOfDeadWritersGoAndThoseOfLivingOnesStay) {
  fs::create_directories(root_);
  // A child that made a temporary directory and died; another that still lives, known by its
  // process alone.
  int ready[2], release[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(release), 0);
  const auto child = [&](bool waits) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      fs::create_directory(temporary_path(root_ / (waits ? "iter_0000002" : "iter_0000001")));
      char c = 'x';
      if (::write(ready[1], &c, 1) == 1 && waits) (void)!::read(release[0], &c, 1);
      ::_exit(0);
    }
    char c;
    EXPECT_EQ(::read(ready[0], &c, 1), 1);
    return pid;
  };
  const pid_t dead = child(false);
  ::waitpid(dead, nullptr, 0);
  const pid_t living = child(true);
  // Of this process, locked; of another host, fresh and old; not ours by name.
  const fs::path own = temporary_path(root_ / "iter_0000003");
  fs::create_directory(own);
  const fs::path foreign = root_ / "iter_0000004.tmp-elsewhere-1-1-0",
                 old = root_ / "iter_0000005.tmp-elsewhere-1-1-0";
  fs::create_directory(foreign);
  fs::create_directory(old);
  fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::hours(48));
  fs::create_directory(root_ / "iter_0000006.tmp-notes");
  spill(root_ / "latest_checkpointed_iteration.txt.tmp-elsewhere-1-1-0", "");
  EXPECT_EQ(names_in(root_).size(), 7u);
  EXPECT_EQ(dead_leftovers(root_).size(), 2u);
  save(10);
  const std::vector<std::string> names = names_in(root_);
  EXPECT_EQ(names.size(), 7u);  // two went, the checkpoint and the hint came
  for (const std::string& name : names) {
    EXPECT_NE(name.substr(0, 12), "iter_0000001");
    EXPECT_NE(name.substr(0, 12), "iter_0000005");
  }
  ASSERT_EQ(::write(release[1], "x", 1), 1);
  ::waitpid(living, nullptr, 0);
  save(11);
  EXPECT_THAT(
      names_in(root_),
      UnorderedElementsAre("iter_0000010", "iter_0000011", kLatestName, own.filename().string(),
                           foreign.filename().string(), "iter_0000006.tmp-notes",
                           "latest_checkpointed_iteration.txt.tmp-elsewhere-1-1-0"));
  for (int fd : {ready[0], ready[1], release[0], release[1]}) ::close(fd);
}

}  // namespace
}  // namespace megatron
