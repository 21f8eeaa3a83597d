// An inaccessible checkpoint is not treated as damaged: no older one is used instead, nothing is
// moved or deleted. Files that are not regular are refused without blocking on them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/access_error.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class Access : public testing::Test {
 protected:
  void SetUp() override {
    for (int64_t iteration : {1, 2}) {
      TinyModel model(static_cast<uint64_t>(iteration));
      save_checkpoint(request_for(model, root_, iteration));
    }
  }
  void TearDown() override { set_io_hook({}); }
  StartRequest resume() const { return {StartMode::kResumeOrFresh, root_, root_, {}, false}; }

  ScratchFolder folder_;
  fs::path root_ = folder_.path() / "run";
};

TEST_F(Access, ErrorsOfTheSystemStopAStartAtEveryOperation) {
  for (const int error : {EACCES, EPERM, EMFILE, ENFILE, ESTALE, EIO, ENOMEM}) {
    int operation = 0;
    for (;; ++operation) {
      int count = 0;
      set_io_hook(
          [&](IoOp, const fs::path&, const fs::path&) { return count++ == operation ? error : 0; });
      std::string message;
      try {
        const StartDecision decision = resolve_start(resume());
        EXPECT_EQ(decision.checkpoint->iteration, 2);
      } catch (const AccessError& caught) {
        message = caught.what();
      }
      set_io_hook({});
      if (count <= operation) break;
      EXPECT_THAT(message, HasSubstr(cat(std::strerror(error), " (errno ", error, ")")))
          << operation;
      EXPECT_THAT(message, HasSubstr(root_.string()));
    }
    EXPECT_GT(operation, 8);
  }
}

TEST_F(Access, ErrorsOfTheSystemNeverMoveAGoodCheckpointAside) {
  TinyModel model(3);
  for (const int error : {EACCES, EMFILE, ESTALE, EIO}) {
    for (const bool replace : {false, true}) {
      SaveRequest request = request_for(model, root_, 2);
      request.replace_existing = replace;
      request.retention.keep_last = 1;
      set_io_hook([&](IoOp op, const fs::path& path, const fs::path&) {
        return op == IoOp::kRead && path.parent_path().filename() == "iter_0000002" ? error : 0;
      });
      const std::string message = error_of([&] { save_checkpoint(request); });
      set_io_hook({});
      EXPECT_THAT(message, HasSubstr(std::strerror(error)));
      EXPECT_THAT(names_in(root_), ElementsAre("iter_0000001", "iter_0000002", kLatestName));
      EXPECT_TRUE(holds_seed(root_ / "iter_0000002", 2));
    }
  }
}

// The kernel's own refusals, as another user than root.
TEST_F(Access, PermissionsOfTheKernel) {
  if (::geteuid() != 0) GTEST_SKIP() << "another user is needed";
  fs::permissions(folder_.path(), fs::perms::all);
  const auto outcome_of_another_user = [&](const fs::path& closed) {
    const fs::perms before = fs::status(closed).permissions();
    fs::permissions(closed, fs::perms::none);
    const pid_t child = ::fork();
    if (child == 0) {
      if (::setuid(65534) != 0) ::_exit(9);
      try {
        resolve_start(resume());
      } catch (const AccessError& error) {
        ::_exit(std::strstr(error.what(),
                            "Permission denied (errno 13)\nhint: the checkpoints and their folder "
                            "must be readable")
                    ? 42
                    : 43);
      } catch (const std::exception&) {
        ::_exit(44);
      }
      ::_exit(45);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    fs::permissions(closed, before);
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(outcome_of_another_user(root_ / "iter_0000002"), 42);
  EXPECT_EQ(outcome_of_another_user(root_ / "iter_0000002" / "manifest.json"), 42);
  EXPECT_EQ(outcome_of_another_user(root_ / "iter_0000002" / "rank_00000.safetensors"), 42);
  EXPECT_EQ(outcome_of_another_user(root_), 42);
}

TEST_F(Access, WhatIsNoRegularFileIsRefusedAtOnce) {
  const auto socket_at = [](const fs::path& path) {
    const fs::path before = fs::current_path();
    fs::current_path(path.parent_path());  // names of sockets are short
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.filename().c_str(), sizeof address.sun_path - 1);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ::close(fd);
    fs::current_path(before);
  };
  const std::vector<std::pair<const char*, std::function<void(const fs::path&)>>> replacements = {
      {"a FIFO", [](const fs::path& path) { EXPECT_EQ(::mkfifo(path.c_str(), 0666), 0); }},
      {"a socket", socket_at},
      {"a folder", [](const fs::path& path) { fs::create_directory(path); }},
      {"a device", [](const fs::path& path) { fs::create_symlink("/dev/zero", path); }},
      {"a terminal", [](const fs::path& path) { fs::create_symlink("/dev/ptmx", path); }},
      {"a loop", [](const fs::path& path) { fs::create_symlink(path.filename(), path); }}};
  for (const auto& [what, make] : replacements) {
    for (const char* name : {"manifest.json", "rank_00000.safetensors", "config.yaml"}) {
      SCOPED_TRACE(cat(what, " as ", name));
      const fs::path file = root_ / "iter_0000002" / name, kept = folder_.path() / "kept";
      fs::rename(file, kept);
      make(file);
      const auto begin = std::chrono::steady_clock::now();
      const StartDecision decision = resolve_start(resume());
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
      EXPECT_EQ(decision.checkpoint->iteration, 1);
      ASSERT_EQ(decision.warnings.size(), 1u);
      EXPECT_THAT(decision.warnings[0], HasSubstr(name));
      fs::remove_all(file);
      fs::rename(kept, file);
    }
  }
  EXPECT_EQ(resolve_start(resume()).checkpoint->iteration, 2);
}

}  // namespace
}  // namespace megatron
