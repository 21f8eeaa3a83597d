// The offline run file of Weights & Biases, written without it: `wandb sync DIR` uploads it, `wandb
// beta sync --live DIR` follows it while it grows, `wandb leet` shows it in the terminal.
//
// <dir>/wandb/offline-run-<date>_<time>-<id>/run-<id>.wandb: 7 bytes of magic, then the record log
// of LevelDB (blocks of 32 KiB; a record is cut into pieces, each with a CRC-32, a length and a
// kind). A record is a protobuf message `Record` of wandb's wandb_internal.proto: header, run (with
// the configuration), history (a row per step), summary, exit.
//
// A resumed run keeps the id of the previous one, stored in <dir>/wandb/megatron-run.json, in a new
// file with resume=allow, as W&B itself does.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/base/append_file.h"
#include "megatron/reporting/metrics_sink.h"

namespace megatron {

// Appends records to a log in LevelDB's format, as wandb writes it. When append() returns, the
// record is in the file.
class WandbLog {
 public:
  explicit WandbLog(std::filesystem::path path);  // a new file. Throws Error
  void append(std::string_view record);
  const std::filesystem::path& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

class WandbSink final : public MetricsSink {
 public:
  struct Options {
    std::filesystem::path folder;  // holds wandb/
    std::string project, entity, name;
    std::string settings_json;  // JSON object: the run's configuration
    // Keep the id of the previous run, if it belongs to the same project
    bool resumed = false;
  };
  explicit WandbSink(const Options& options);  // throws Error

  std::string name() const override { return log_.path().string(); }
  const std::string& run_id() const { return run_id_; }
  void record(const MetricsRecord& record) override;
  bool takes_scalars() const override { return true; }
  // A step has one row: sets of one iteration are collected until the next iteration begins.
  void scalars(const ScalarSet& set) override;
  void close() override;

 private:
  void write_row();
  void write_summary();
  void write(int field, std::string_view message);

  std::string run_id_;
  WandbLog log_;
  int64_t num_records_ = 0;
  double start_time_;                                     // seconds since 1970
  std::vector<std::pair<std::string, std::string>> row_;  // key, JSON
  int64_t row_iteration_ = -1;
  std::map<std::string, std::string> summary_;  // the latest value of each key
  std::chrono::steady_clock::time_point last_summary_;
  int exit_code_ = 1;  // unless the run reports its end
};

}  // namespace megatron
