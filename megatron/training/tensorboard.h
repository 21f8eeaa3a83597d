// TensorBoard event files, written without TensorBoard.
//
// A file is a sequence of TFRecords: u64 length, u32 masked CRC-32C of the length, data, u32 masked CRC-32C of the data, all
// little-endian. Data is a protobuf `Event`: wall_time (field 1, double), step (2, int64), file_version (3, string; first
// record only) or summary (5); a `Summary` holds values (1) of tag (1, string) and simple_value (2, float).
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace megatron {

uint32_t crc32c(std::string_view data);

// Appends scalars to one new event file. Not thread safe.
class TensorBoardWriter {
 public:
  // Creates `directory` and in it "events.out.tfevents.<seconds>.<host>.<pid>.<n>". Throws Error.
  explicit TensorBoardWriter(const std::filesystem::path& directory);

  void scalar(std::string_view tag, double value, int64_t step);
  void flush();
  const std::filesystem::path& path() const { return path_; }

 private:
  void record(std::string_view event);
  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace megatron
