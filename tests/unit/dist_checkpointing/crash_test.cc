// kill -9 during saves: a child process saves in a loop and is killed at a random time; the files
// it leaves must match its step numbers, and the next child must resume from them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/async_saver.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kCrashRows = 400;

SaveRequest request_of_step(TinyModel& model, const fs::path& root, int64_t step) {
  SaveRequest request = request_for(model, root, step);
  request.retention.keep_last = 2;
  request.retention.retain_interval = 50;
  return request;
}

// The child: resumes, then saves step after step, reporting each published step through the pipe.
// Never returns.
[[noreturn]] void save_for_ever(const fs::path& root, bool background, int pipe_fd) {
  const auto report = [&](int64_t step) {
    if (::write(pipe_fd, &step, sizeof step) != sizeof step) ::_exit(3);
  };
  try {
    const StartDecision start = resolve_start({StartMode::kResumeOrFresh, root, root, {}, false});
    int64_t step = start.checkpoint ? start.checkpoint->iteration : 0;
    if (start.checkpoint &&
        !holds_seed(start.checkpoint->directory, static_cast<uint64_t>(step), kCrashRows))
      ::_exit(4);
    AsyncSaver saver(2);
    for (;;) {
      auto model = std::make_shared<TinyModel>(static_cast<uint64_t>(++step), kCrashRows);
      if (background) {
        saver.submit(request_of_step(*model, root, step), model);
        for (const SaveOutcome& outcome : saver.poll()) {
          if (!outcome.error.empty()) ::_exit(5);
          report(outcome.iteration);
        }
      } else {
        save_checkpoint(request_of_step(*model, root, step));
        report(step);
      }
    }
  } catch (const std::exception& error) {
    (void)!::write(2, error.what(), std::strlen(error.what()));
    ::_exit(6);
  }
}

// The newest usable checkpoint must be at least the last one reported, and every usable one must
// hold its own step.
int64_t check_folder(const fs::path& root, int64_t reported) {
  const std::vector<CheckpointEntry> entries = find_checkpoints(root, CheckDepth::kFull);
  int64_t newest = 0;
  for (const CheckpointEntry& entry : entries) {
    EXPECT_EQ(entry.problem, "");  // nothing half-written ever has a checkpoint's name
    if (!entry.problem.empty()) continue;
    EXPECT_TRUE(holds_seed(entry.directory, static_cast<uint64_t>(entry.iteration), kCrashRows))
        << entry.directory;
    newest = std::max(newest, entry.iteration);
  }
  EXPECT_GE(newest, reported);
  return newest;
}

void kill_often(bool background, int rounds) {
  ScratchFolder folder;
  const fs::path root = folder.path() / "run";
  std::mt19937_64 random(background ? 5 : 6);
  int64_t newest = 0;
  for (int round = 0; round < rounds; ++round) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(ends[0]);
      save_for_ever(root, background, ends[1]);
    }
    ::close(ends[1]);
    // Three of four are killed some time after their first save, so that there is progress on a
    // busy machine too; the fourth at any instant, while it starts and resumes included.
    int64_t reported = newest, step = 0;
    if (round % 4 != 0 && ::read(ends[0], &step, sizeof step) == sizeof step) reported = step;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 15000));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << WEXITSTATUS(status);
    while (::read(ends[0], &step, sizeof step) == sizeof step) reported = step;
    ::close(ends[0]);
    const int64_t now = check_folder(root, reported);
    ASSERT_GE(now, newest);
    newest = now;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(newest, rounds / 2);  // the children did save
  // The next save sweeps what the killed ones left.
  TinyModel last(static_cast<uint64_t>(newest + 1), kCrashRows);
  EXPECT_TRUE(save_checkpoint(request_of_step(last, root, newest + 1)).warnings.empty());
  for (const std::string& name : names_in(root))
    EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
}

TEST(Crash, KilledAtRandomInstantsOfSynchronousSaves) { kill_often(false, 110); }

TEST(Crash, KilledAtRandomInstantsOfBackgroundSaves) { kill_often(true, 110); }

// Killed before every single operation on the disk in turn, retention included: the old checkpoint
// or the new one is there, whole.
TEST(Crash, KilledBeforeEveryOperation) {
  ScratchFolder folder;
  const fs::path root = folder.path() / "run", pristine = folder.path() / "pristine";
  for (int64_t step : {1, 2, 3}) {
    TinyModel model(static_cast<uint64_t>(step), kCrashRows);
    save_checkpoint(request_for(model, pristine, step));
  }
  int published_by_the_killed = 0, operation = 0;
  for (bool ended = false; !ended; ++operation) {
    ASSERT_LT(operation, 500);
    fs::remove_all(root);
    fs::copy(pristine, root, fs::copy_options::recursive);
    const pid_t child = ::fork();
    if (child == 0) {
      int count = 0;
      set_io_hook([&](IoOp, const fs::path&, const fs::path&) {
        if (count++ == operation) ::raise(SIGKILL);
        return 0;
      });
      TinyModel model(4, kCrashRows);
      save_checkpoint(request_of_step(model, root, 4));
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ended = WIFEXITED(status);
    const int64_t newest = check_folder(root, ended ? 4 : 3);
    ASSERT_LE(newest, 4);
    published_by_the_killed += !ended && newest == 4;
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_GT(operation, 40);
  EXPECT_GT(published_by_the_killed, 10);  // in the hint, the verification, the deletions
}

}  // namespace
}  // namespace megatron
