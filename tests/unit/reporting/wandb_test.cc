#include "megatron/reporting/wandb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

constexpr size_t kBlock = 32768;

std::filesystem::path fresh_folder(const std::string& name) {
  const auto folder = std::filesystem::path(testing::TempDir()) / name;
  std::filesystem::remove_all(folder);
  return folder;
}

// The records of a log, by the rules of LevelDB's log format; checks every piece.
std::vector<std::string> read_log(const std::string& data) {
  std::vector<std::string> records;
  std::string whole;
  bool inside = false;
  EXPECT_EQ(data.substr(0, 7), std::string(":W&B\xE1\xBE\0", 7));
  for (size_t at = 7; at < data.size();) {
    const size_t left = kBlock - at % kBlock;
    if (left < 7) {
      EXPECT_EQ(data.substr(at, left), std::string(std::min(left, data.size() - at), '\0'));
      at += left;
      continue;
    }
    uint32_t crc = 0;
    uint16_t size = 0;
    std::memcpy(&crc, data.data() + at, 4);
    std::memcpy(&size, data.data() + at + 4, 2);
    const int kind = data[at + 6];
    EXPECT_LE(size + 7u, left) << "a piece crosses a block";
    EXPECT_EQ(crc, crc32(0, reinterpret_cast<const Bytef*>(data.data() + at + 6), size + 1u));
    EXPECT_EQ(inside, kind == 3 || kind == 4);
    whole += data.substr(at + 7, size);
    inside = kind == 2 || kind == 3;
    at += 7u + size;
    if (!inside) records.push_back(std::exchange(whole, ""));
  }
  EXPECT_FALSE(inside);
  return records;
}

TEST(WandbLog, RecordsFitEveryPlaceInABlock) {
  const auto folder = fresh_folder("wandb_log");
  for (size_t left = 0; left <= 16; ++left) {
    WandbLog log(folder / cat(left, ".wandb"));
    std::vector<std::string> records = {std::string(kBlock - 7 - 7 - left, 'a'), "b",
                                        std::string(3 * kBlock, 'c'), "", "d"};
    for (const std::string& record : records) log.append(record);
    EXPECT_EQ(read_log(read_file(log.path())), records) << left << " bytes left in the first block";
  }
}

TEST(WandbLog, IsANewFile) {
  const auto path = fresh_folder("wandb_log_new") / "x.wandb";
  WandbLog(path).append("a");
  EXPECT_THROW(WandbLog{path}, Error);
}

WandbSink::Options options_in(const std::filesystem::path& folder) {
  return {folder, "project", "", "", R"({"lr": 0.5})", false};
}

TEST(WandbSink, AResumedRunKeepsItsIdInItsProject) {
  const auto folder = fresh_folder("wandb_ids");
  const std::string first = WandbSink(options_in(folder)).run_id();
  EXPECT_THAT(first, testing::MatchesRegex("[a-z0-9]{8}"));
  WandbSink::Options again = options_in(folder);
  again.resumed = true;
  EXPECT_EQ(WandbSink(again).run_id(), first);
  again.project = "other";
  testing::internal::CaptureStderr();
  EXPECT_NE(WandbSink(again).run_id(), first);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr("names no run of the project other: a new W&B run begins"));
  EXPECT_NE(WandbSink(options_in(folder)).run_id(), first) << "a fresh run is a new one";
}

TEST(WandbSink, ARowIsWrittenWhenTheNextOneBegins) {
  WandbSink sink(options_in(fresh_folder("wandb_rows")));
  const auto count = [&] { return read_log(read_file(sink.name())).size(); };
  EXPECT_EQ(count(), 2u);  // header, run
  sink.scalars({1, 4, {{"lm loss", 2.5}}, 1.7e9});
  sink.scalars({1, std::nullopt, {{"lm loss validation", 3.5}}, 1.7e9});
  EXPECT_EQ(count(), 2u);
  sink.scalars({2, 8, {{"lm loss", std::nan("")}}, 1.7e9});
  EXPECT_EQ(count(), 4u) << "the row, and a first summary";
  sink.close();
  const std::vector<std::string> records = read_log(read_file(sink.name()));
  ASSERT_EQ(records.size(), 7u);  // row, summary, exit
  EXPECT_THAT(records[2], testing::AllOf(testing::HasSubstr("lm loss validation"),
                                         testing::HasSubstr("3.5"), testing::HasSubstr("_step")));
  EXPECT_THAT(records[4], testing::HasSubstr("NaN"));
}

}  // namespace
}  // namespace megatron
