#include "megatron/base/append_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

using testing::HasSubstr;

std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(folder);
  return folder;
}

template <class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(AppendFile, AppendsToWhatIsThere) {
  const auto path = fresh_folder("append_file") / "below" / "file";
  AppendFile(path).append("one\n");
  AppendFile file(path);
  file.append("two\n");
  EXPECT_EQ(file.size(), 8u);
  EXPECT_EQ(read_file(path), "one\ntwo\n");
}

TEST(AppendFile, CutsOffWhatAFailedWriteLeft) {
  const auto path = fresh_folder("append_file_full") / "file";
  AppendFile file(path);
  file.append("12345678");
  const auto before = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit tight{12, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const std::string message = message_of([&] { file.append("abcdefgh"); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, before);
  EXPECT_THAT(message, HasSubstr(path.string() + " cannot be written: File too large"));
  EXPECT_EQ(read_file(path), "12345678");
  file.append("abc");
  EXPECT_EQ(read_file(path), "12345678abc");
}

TEST(AppendFile, NoticesThatTheFileIsGone) {
  const auto path = fresh_folder("append_file_gone") / "file";
  AppendFile file(path);
  file.append("x");
  std::filesystem::remove_all(path.parent_path());
  EXPECT_THAT(message_of([&] { file.append("y"); }), HasSubstr(path.string() + " was deleted"));
}

TEST(AppendFile, RefusesWhatIsNoFile) {
  const auto folder = fresh_folder("append_file_kinds");
  std::filesystem::create_directories(folder);
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { AppendFile file(folder / "fifo"); }),
              HasSubstr("cannot be written: No such device"));
  EXPECT_THAT(message_of([&] { AppendFile file("/dev/full"); }),
              HasSubstr("/dev/full is no regular file"));
  EXPECT_THAT(message_of([&] { AppendFile file(folder); }),
              HasSubstr("cannot be written: Is a directory"));
}

}  // namespace
}  // namespace megatron
