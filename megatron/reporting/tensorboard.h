// TensorBoard event files, written without TensorBoard.
//
// A file is a sequence of TFRecords: u64 length, u32 masked CRC-32C of the length, data, u32 masked
// CRC-32C of the data, all little-endian. Data is a protobuf `Event`: wall_time (field 1, double),
// step (2, int64), file_version (3, string; first record only) or summary (5); a `Summary` holds
// values (1) of tag (1, string) and simple_value (2, float).
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "megatron/base/append_file.h"
#include "megatron/reporting/metrics_sink.h"

namespace megatron {

uint32_t crc32c(std::string_view data);

// Appends scalars to one new event file.
class TensorBoardSink final : public MetricsSink {
 public:
  // Creates `directory` and in it "events.out.tfevents.<seconds>.<host>.<pid>.<n>". Writes after
  // `queue_size` scalars or after two minutes. Throws Error.
  TensorBoardSink(const std::filesystem::path& directory, int64_t queue_size);

  std::string name() const override { return file_.path().string(); }
  void record(const MetricsRecord&) override {}
  bool takes_scalars() const override { return true; }
  // Writes each value by iteration and, if the samples are known, as "<tag> vs samples".
  void scalars(const ScalarSet& set) override;
  void close() override { write(); }
  const std::filesystem::path& path() const { return file_.path(); }

 private:
  void add(std::string_view tag, double value, int64_t step, double time);
  void write();

  AppendFile file_;
  int64_t queue_size_;
  std::string queued_;
  int64_t num_queued_ = 0;
  std::chrono::steady_clock::time_point last_write_;
};

}  // namespace megatron
