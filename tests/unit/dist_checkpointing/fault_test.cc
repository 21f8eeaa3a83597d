// Disk failures at every operation of a save: a clear error, the old checkpoint intact, no
// leftovers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <random>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/async_saver.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Installs a hook for its lifetime.
class Hooked {
 public:
  explicit Hooked(IoHook hook) { set_io_hook(std::move(hook)); }
  ~Hooked() { set_io_hook({}); }
};

class Fault : public testing::Test {
 protected:
  void SetUp() override { save_checkpoint(request_for(old_, root_, 1)); }
  void expect_old_is_intact() {
    EXPECT_TRUE(holds_seed(root_ / "iter_0000001", 1));
    EXPECT_TRUE(verify_checkpoint(root_ / "iter_0000001").empty());
  }

  ScratchFolder folder_;
  fs::path root_ = folder_.path() / "run";
  TinyModel old_{1}, new_{2};
};

// Fails the n-th operation with each error, for every n.
TEST_F(Fault, EveryOperationFailsCleanly) {
  for (int error : {ENOSPC, EIO, EACCES, EROFS, EDQUOT}) {
    int failures = 0, warned = 0;
    for (int operation = 0;; ++operation) {
      ASSERT_LT(operation, 500);
      int count = 0;
      std::string message;
      SaveResult result;
      {
        const Hooked hooked([&](IoOp op, const fs::path&, const fs::path&) {
          // Only the operation itself fails: what cleans up afterwards works.
          return op != IoOp::kRead && count++ == operation ? error : 0;
        });
        SaveRequest request = request_for(new_, root_, 2);
        try {
          result = save_checkpoint(request);
        } catch (const Error& caught) {
          message = caught.what();
        }
      }
      expect_old_is_intact();
      const bool has_new = fs::exists(root_ / "iter_0000002");
      if (!message.empty()) {
        ++failures;
        EXPECT_THAT(message, HasSubstr(cat(std::strerror(error), " (errno ", error, ")")));
        EXPECT_THAT(message, HasSubstr(root_.string()));
      }
      // After a failure nothing new is there, except when syncing the parent is what failed: then
      // it is whole.
      if (has_new) {
        EXPECT_TRUE(holds_seed(root_ / "iter_0000002", 2)) << operation;
      } else {
        EXPECT_FALSE(message.empty());
        EXPECT_THAT(names_in(root_), ElementsAre("iter_0000001", kLatestName)) << message;
      }
      warned += !result.warnings.empty();
      fs::remove_all(root_ / "iter_0000002");
      for (const std::string& name : names_in(root_))
        if (name.find(".tmp-") != std::string::npos) fs::remove_all(root_ / name);  // of the hint
      if (count <= operation) break;
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(failures, 15);
    EXPECT_GT(warned, 2);  // failures after the publication
  }
}

TEST_F(Fault, ShortTransfersAndInterruptionsAreContinued) {
  std::mt19937_64 random(3);
  const Hooked hooked([&](IoOp op, const fs::path&, const fs::path&) {
    if (op != IoOp::kWrite && op != IoOp::kRead) return 0;
    return random() % 3 == 0 ? kIoShort : random() % 3 == 0 ? EINTR : 0;
  });
  const fs::path directory = save_checkpoint(request_for(new_, root_, 2)).directory;
  EXPECT_TRUE(verify_checkpoint(directory, {.threads = 1}).empty());
  EXPECT_TRUE(holds_seed(directory, 2));
}

TEST_F(Fault, ReadErrorsAreNamed) {
  for (int operation = 0;; ++operation) {
    int count = 0;
    std::string message;
    TinyModel target(0);
    {
      const Hooked hooked(
          [&](IoOp, const fs::path&, const fs::path&) { return count++ == operation ? EIO : 0; });
      try {
        Checkpoint(root_ / "iter_0000001").load(target.tensors(), {.threads = 1});
      } catch (const Error& error) {
        message = error.what();
      }
    }
    if (count <= operation) break;
    EXPECT_THAT(message, HasSubstr("Input/output error (errno 5)"));
    EXPECT_THAT(message, HasSubstr("iter_0000001"));
  }
}

// A disk that takes a write and gives back something else: the writer finds out before anything is
// published or deleted.
TEST_F(Fault, WhatReadsBackOtherwiseIsNotPublished) {
  for (const char* file : {"rank_00000.safetensors", "config.yaml", "manifest.json"}) {
    fs::path broken;
    const Hooked hooked([&](IoOp op, const fs::path& path, const fs::path&) {
      if (op == IoOp::kSync && path.filename() == file) broken = path;
      if (op == IoOp::kRead && path == broken && !path.empty()) {
        flip_bit(path, 8 * (fs::file_size(path) / 2));
        broken.clear();
      }
      return 0;
    });
    SaveRequest request = request_for(new_, root_, 2);
    request.retention.keep_last = 1;
    const std::string message = error_of([&] { save_checkpoint(request); });
    EXPECT_THAT(message, HasSubstr(file));
    EXPECT_THAT(message, HasSubstr("it was written a moment ago and is read back otherwise"));
    EXPECT_THAT(names_in(root_), ElementsAre("iter_0000001", kLatestName));
    expect_old_is_intact();
  }
}

TEST_F(Fault, TheBackgroundSaverReportsAFullDiskAndGoesOn) {
  AsyncSaver saver;
  auto model = std::make_shared<TinyModel>(2);
  {
    const Hooked hooked(
        [](IoOp op, const fs::path&, const fs::path&) { return op == IoOp::kWrite ? ENOSPC : 0; });
    saver.submit(request_for(*model, root_, 2), model);
    const std::vector<SaveOutcome> outcomes = saver.finish();
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_THAT(outcomes[0].error, HasSubstr("saving iteration 2 failed: cannot write " +
                                             (root_ / "iter_0000002.tmp-").string()));
    EXPECT_THAT(outcomes[0].error,
                HasSubstr("No space left on device (errno 28)\nhint: free space there"));
  }
  saver.submit(request_for(*model, root_, 3), model);
  EXPECT_EQ(saver.finish().at(0).error, "");
  EXPECT_TRUE(holds_seed(root_ / "iter_0000003", 2));
}

// The kernel's own limits rather than injected ones.
TEST_F(Fault, ALimitOnFileSizesIsAnErrorNotASignal) {
  for (const rlim_t limit : {rlim_t{100}, rlim_t{1000}, rlim_t{9000}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit limits{limit, limit};
      ::setrlimit(RLIMIT_FSIZE, &limits);
      try {
        save_checkpoint(request_for(new_, root_, 2));
      } catch (const Error& error) {
        ::_exit(
            std::strstr(error.what(), "File too large (errno 27)\nhint: the limit on file sizes")
                ? 42
                : 43);
      }
      ::_exit(44);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 42);
    EXPECT_THAT(names_in(root_), ElementsAre("iter_0000001", kLatestName));
    expect_old_is_intact();
  }
}

TEST_F(Fault, AFullFileSystem) {
  const fs::path small = folder_.path() / "small";
  fs::create_directory(small);
  if (::mount("tmpfs", small.c_str(), "tmpfs", 0, "size=96k") != 0)
    GTEST_SKIP() << "mounting a small tmpfs needs root";
  save_checkpoint(request_for(old_, small, 1));
  std::string message;
  for (int64_t step = 2; step < 20 && message.empty(); ++step) {
    try {
      save_checkpoint(request_for(new_, small, step));
    } catch (const Error& error) {
      message = error.what();
    }
  }
  EXPECT_THAT(message, HasSubstr("No space left on device (errno 28)"));
  EXPECT_TRUE(holds_seed(small / "iter_0000001", 1));
  for (const std::string& name : names_in(small)) EXPECT_EQ(name.find(".tmp-"), std::string::npos);
  ::umount(small.c_str());
}

TEST_F(Fault, UnwritableFolders) {
  if (::geteuid() == 0) {
    // Root passes permission bits; a file in the place of the folder stops it too.
    spill(folder_.path() / "plain", "");
    EXPECT_THAT(error_of([&] { save_checkpoint(request_for(new_, folder_.path() / "plain", 2)); }),
                AnyOf(HasSubstr("is not a folder"), HasSubstr("exists and is not a folder")));
    EXPECT_THAT(error_of([&] {
                  save_checkpoint(request_for(new_, folder_.path() / "plain" / "deeper", 2));
                }),
                HasSubstr("plain"));
    return;
  }
  fs::permissions(root_, fs::perms::owner_read | fs::perms::owner_exec);
  const std::string message = error_of([&] { save_checkpoint(request_for(new_, root_, 2)); });
  fs::permissions(root_, fs::perms::owner_all);
  EXPECT_THAT(message,
              HasSubstr("Permission denied (errno 13)\nhint: the folder must be writable"));
  expect_old_is_intact();
}

}  // namespace
}  // namespace megatron
