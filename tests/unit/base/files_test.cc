#include "megatron/base/files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <thread>

#include "megatron/base/check.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class FilesTest : public testing::Test {
 protected:
  FilesTest() {
    std::string name = testing::TempDir() + "files_test_XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~FilesTest() override { fs::remove_all(folder_); }

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder_))
      out.push_back(entry.path().filename());
    std::sort(out.begin(), out.end());
    return out;
  }

  fs::path folder_;
};

std::string text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

TEST_F(FilesTest, WritesAndReadsBack) {
  const fs::path path = folder_ / "a";
  write_file_atomically(path, "first");
  write_file_atomically(path, std::string("second\0!", 8));
  EXPECT_EQ(read_file(path), std::string("second\0!", 8));
  EXPECT_EQ(text_of(MappedFile(path)), std::string("second\0!", 8));
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(FilesTest, WritesLargeAndSmallPiecesInOrder) {
  std::string expected;
  AtomicFileWriter file(folder_ / "a");
  for (size_t i = 0; i < 300; ++i) {
    const std::string piece(i * 37 % 20000 + (i == 150 ? 3000000 : 0),
                            static_cast<char>('a' + i % 26));
    file.write(piece);
    expected += piece;
    EXPECT_EQ(file.size_bytes(), expected.size());
  }
  file.commit();
  EXPECT_EQ(file.size_bytes(), expected.size());
  EXPECT_EQ(read_file(folder_ / "a"), expected);
}

TEST_F(FilesTest, EmptyFilesAndMoves) {
  write_file_atomically(folder_ / "empty", "");
  write_file_atomically(folder_ / "a", "abc");
  EXPECT_EQ(MappedFile(folder_ / "empty").bytes().size(), 0u);
  EXPECT_EQ(read_file(folder_ / "empty"), "");
  MappedFile a(folder_ / "a");
  MappedFile b = std::move(a);
  EXPECT_EQ(text_of(b), "abc");
  EXPECT_TRUE(a.bytes().empty());  // NOLINT: moved from on purpose
  MappedFile c;
  c = std::move(b);
  EXPECT_EQ(text_of(c), "abc");
  EXPECT_EQ(c.path(), folder_ / "a");
}

TEST_F(FilesTest, ReadsFilesWhoseSizeIsNotKnown) {
  EXPECT_THAT(read_file("/proc/self/status"), HasSubstr("Name:"));
  int ends[2];  // as the shell makes for <(command)
  ASSERT_EQ(::pipe(ends), 0);
  const std::string long_text(200000, 'x');
  std::thread writer([&] {
    EXPECT_EQ(::write(ends[1], long_text.data(), long_text.size()),
              static_cast<ssize_t>(long_text.size()));
    ::close(ends[1]);
  });
  EXPECT_EQ(read_file("/dev/fd/" + std::to_string(ends[0])), long_text);
  writer.join();
  ::close(ends[0]);
  EXPECT_EQ(read_file("/dev/null"), "");
}

// Nothing writes to the FIFO, so that reading it would wait for ever.
TEST_F(FilesTest, WhatIsNoFileIsRefusedAtOnce) {
  const std::string fifo = (folder_ / "fifo").string();
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::string refused = "cannot read " + fifo +
                              ": it is a FIFO, not a regular file\n"
                              "hint: write the data to a file and give its path";
  EXPECT_EQ(error_of([&] { read_file(fifo); }), refused);
  EXPECT_EQ(error_of([&] { MappedFile{fs::path(fifo)}; }), refused);
  EXPECT_EQ(error_of([&] { check_regular_file(fifo); }), refused);
  EXPECT_EQ(error_of([&] { check_input_file(fifo); }), refused);
  EXPECT_THAT(error_of([&] { read_file("/dev/zero"); }),
              HasSubstr("cannot read /dev/zero: it is a device"));
}

TEST_F(FilesTest, TooLongFilesAreNotRead) {
  const fs::path path = folder_ / "a";
  write_file_atomically(path, "12345");
  EXPECT_EQ(read_file(path, 5), "12345");
  const std::string refused = "cannot read " + path.string() +
                              ": it is longer than 4 bytes, the most that such a file may have";
  EXPECT_EQ(error_of([&] { read_file(path, 4); }), refused);
  fs::resize_file(path, uint64_t{1} << 40);
  EXPECT_EQ(error_of([&] { read_file(path, 4); }), refused);
  EXPECT_THAT(error_of([&] { read_file("/proc/self/maps", 10); }),
              HasSubstr("it is longer than 10 bytes"));
}

TEST_F(FilesTest, AMapOutlivesTheReplacementOfItsFile) {
  write_file_atomically(folder_ / "a", "old");
  const MappedFile old(folder_ / "a");
  write_file_atomically(folder_ / "a", "brand new");
  EXPECT_EQ(text_of(old), "old");
}

TEST_F(FilesTest, NothingIsLeftWithoutCommit) {
  {
    AtomicFileWriter file(folder_ / "a");
    file.write(std::string(3 << 20, 'x'));
    EXPECT_EQ(names().size(), 1u);
    EXPECT_THAT(names()[0], HasSubstr("a.tmp-"));
  }
  EXPECT_TRUE(names().empty());
  EXPECT_THROW(
      {
        AtomicFileWriter file(folder_ / "a");
        file.write("half");
        throw Error("interrupted");
      },
      Error);
  EXPECT_TRUE(names().empty());
}

TEST_F(FilesTest, AFailedReplacementKeepsTheOldFile) {
  fs::create_directory(folder_ / "a");
  write_file_atomically(folder_ / "a" / "inside", "x");
  const std::string a = (folder_ / "a").string();
  EXPECT_THAT(error_of([&] { write_file_atomically(a, "text"); }),
              HasSubstr("cannot replace " + a + ": Is a directory"));
  EXPECT_THAT(names(), ElementsAre("a"));
  EXPECT_EQ(read_file(folder_ / "a" / "inside"), "x");
}

// A full disk, by way of the limit on the size of a file.
TEST_F(FilesTest, AFullDiskLeavesTheOldFileAndNothingElse) {
  const fs::path path = folder_ / "a";
  write_file_atomically(path, "old");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 16, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string in_write = error_of([&] {
    AtomicFileWriter file(path);
    for (int i = 0; i < 100; ++i) file.write(std::string(100000, 'x'));
    file.commit();
  });
  const std::string in_commit =
      error_of([&] { write_file_atomically(path, std::string(100000, 'x')); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(in_write, "cannot write " + path.string() + ": File too large");
  EXPECT_EQ(in_commit, in_write);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_THAT(names(), ElementsAre("a"));
}

TEST_F(FilesTest, ErrorsNameThePathAndTheReason) {
  const std::string missing = (folder_ / "no" / "file").string();
  EXPECT_EQ(error_of([&] { read_file(missing); }),
            "cannot open " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { MappedFile{fs::path(missing)}; }),
            "cannot open " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { AtomicFileWriter{fs::path(missing)}; }),
            "cannot create " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { sync_path(missing); }),
            "cannot open " + missing + ": No such file or directory");
  EXPECT_EQ(error_of([&] { read_file(folder_); }),
            "cannot read " + folder_.string() + ": Is a directory");
  EXPECT_EQ(error_of([&] { MappedFile{folder_}; }),
            "cannot read " + folder_.string() + ": Is a directory");
  EXPECT_EQ(error_of([&] { MappedFile{fs::path("/dev/null")}; }),
            "cannot read /dev/null: it is a device, not a regular file\n"
            "hint: write the data to a file and give its path");
  EXPECT_EQ(error_of([&] { sync_path(folder_); }), "");
}

TEST_F(FilesTest, CommitIsFinal) {
  AtomicFileWriter file(folder_ / "a");
  file.commit();
  EXPECT_THROW(file.write("x"), InternalError);
  EXPECT_THROW(file.commit(), InternalError);
}

TEST_F(FilesTest, ManyWritersOfOnePathLeaveOneWholeFile) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i)
        write_file_atomically(folder_ / "a", std::string(5000, static_cast<char>('a' + t)));
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(names(), ElementsAre("a"));
  const std::string text = read_file(folder_ / "a");
  EXPECT_EQ(text, std::string(5000, text[0]));
}

TEST(Messages, AddressesAreFound) {
  EXPECT_TRUE(holds_address("at 0x0, <reader at 0x7ffd12345678>"));
  EXPECT_FALSE(holds_address("marker 0xd8, code 0xffffffff"));
}

}  // namespace
}  // namespace megatron
