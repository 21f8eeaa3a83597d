#include "megatron/runtime/folder_lock.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <optional>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/files.h"
#include "megatron/base/process.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class FolderLockTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / cat("folder_lock_", ::getpid());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The error that taking the lock throws; empty: none.
  std::string refusal(FolderLockOptions options = {}) {
    try {
      FolderLock lock(folder_, std::move(options));
    } catch (const Error& error) {
      class_ = failure_class(error);
      return error.what();
    }
    return "";
  }

  // A lock of another host, last touched so long ago.
  void write_foreign_lock(int64_t seconds_ago, const std::string& run_id = "",
                          int restart_count = 0) {
    fs::create_directories(folder_);
    write_file_atomically(
        folder_ / kLockName,
        cat(R"({"host": "node7", "pid": 4711, "start": 1, "since": 1700000000, "run_id": ")",
            run_id, R"(", "restart_count": )", restart_count, "}\n"));
    timespec times[2] = {};
    times[0].tv_sec = times[1].tv_sec = std::time(nullptr) - seconds_ago;
    ASSERT_EQ(::utimensat(AT_FDCWD, (folder_ / kLockName).c_str(), times, 0), 0);
  }

  fs::path folder_;
  FailureClass class_ = FailureClass::kInternal;
};

TEST_F(FolderLockTest, ASecondWriterOfThisHostIsRefusedByName) {
  std::optional<FolderLock> first(folder_);
  EXPECT_EQ(first->previous_owner(), "");
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr(cat(folder_.string(), " is in use by another run: process ",
                                  ::getpid(), " on ", host_name(), " since 2")),
                    HasSubstr("\nhint: ")));
  EXPECT_EQ(class_, FailureClass::kDoNotRetry);
  first->check();
  first.reset();
  EXPECT_FALSE(fs::exists(folder_ / kLockName));
  EXPECT_EQ(refusal(), "");
}

TEST_F(FolderLockTest, ContentsCountWhereTheFileSystemDoesNotLock) {
  // A process of this machine that lives, and no flock() on the file.
  fs::create_directories(folder_);
  const int64_t pid = ::getpid();
  const auto write = [&](uint64_t start) {
    write_file_atomically(folder_ / kLockName,
                          cat(R"({"host": ")", host_name(), R"(", "pid": )", pid, R"(, "start": )",
                              start, R"(, "since": 1, "run_id": "", "restart_count": 0})"));
  };
  write(process_start(pid));
  EXPECT_THAT(refusal(), HasSubstr(cat("process ", pid)));
  write(process_start(pid) + 1);  // the number was used again
  EXPECT_EQ(refusal(), "");
}

TEST_F(FolderLockTest, ADeadOwnersLockIsTakenOver) {
  const pid_t child = ::fork();
  if (child == 0) {
    new FolderLock(folder_);  // never released
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(fs::exists(folder_ / kLockName));
  FolderLock lock(folder_);
  EXPECT_THAT(lock.previous_owner(), HasSubstr(cat("process ", child, " on ", host_name())));
  EXPECT_THAT(refusal(), HasSubstr(cat("process ", ::getpid())));
}

TEST_F(FolderLockTest, AnotherHostsFreshLockIsRefusedAndItsStaleOneTakenOver) {
  write_foreign_lock(20);
  EXPECT_THAT(
      refusal(),
      AllOf(HasSubstr("process 4711 on node7 since 2023-11-14 22:13:20 UTC, last sign of life 2"),
            HasSubstr("180 s after its last sign of life")));
  EXPECT_EQ(class_, FailureClass::kRetry);  // its machine may be gone
  write_foreign_lock(170);
  EXPECT_NE(refusal(), "");
  write_foreign_lock(190);
  FolderLock lock(folder_);
  EXPECT_THAT(lock.previous_owner(), HasSubstr("node7"));
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_))
    EXPECT_EQ(entry.path().filename(), kLockName) << "left behind";
}

TEST_F(FolderLockTest, AnEarlierAttemptOfTheSameJobIsOver) {
  FolderLockOptions options;
  options.run_id = "slurm-12-0";
  options.restart_count = 1;
  write_foreign_lock(5, "slurm-12-0", 0);
  EXPECT_EQ(refusal(options), "");
  write_foreign_lock(5, "slurm-12-0", 1);
  EXPECT_NE(refusal(options), "");
  write_foreign_lock(5, "slurm-13-0", 0);
  EXPECT_NE(refusal(options), "");
  write_foreign_lock(5, "", 0);
  options.run_id.clear();
  EXPECT_NE(refusal(options), "");
}

TEST_F(FolderLockTest, TheOwnerShowsSignsOfLifeAndNoticesATakeover) {
  FolderLockOptions options;
  options.touch_seconds = 0.01;
  FolderLock lock(folder_, options);
  const auto untouched = [&] {
    struct stat status;
    return ::stat((folder_ / kLockName).c_str(), &status) == 0 && status.st_mtim.tv_sec == 1;
  };
  timespec times[2] = {{1, 0}, {1, 0}};
  ::utimensat(AT_FDCWD, (folder_ / kLockName).c_str(), times, 0);
  for (int i = 0; i < 1000 && untouched(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(untouched());
  lock.check();
  write_foreign_lock(0);
  EXPECT_THROW(lock.check(), Error);
  lock.release();
  EXPECT_TRUE(fs::exists(folder_ / kLockName)) << "it is the other run's";
}

TEST_F(FolderLockTest, LeftoversThatAreNoLockDoNotStopARun) {
  fs::create_directories(folder_);
  for (const char* text : {"", "{", "[]", "null", "{\"host\": 3}"}) {
    write_file_atomically(folder_ / kLockName, text);
    EXPECT_EQ(refusal(), "") << text;
  }
  ASSERT_EQ(::mkfifo((folder_ / kLockName).c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("is not a regular file"));
}

TEST_F(FolderLockTest, AFolderThatCannotBeMadeIsNamed) {
  folder_ = "/proc/nowhere/run";
  EXPECT_THAT(refusal(), HasSubstr("cannot create folder /proc/nowhere/run: "));
}

}  // namespace
}  // namespace megatron
