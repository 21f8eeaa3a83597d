// The latest metrics of a run as a text file for Prometheus (node_exporter's textfile collector).
// Format: https://prometheus.io/docs/instrumenting/exposition_formats/
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "megatron/reporting/metrics_sink.h"

namespace megatron {

// Replaces the file atomically (a temporary file, then rename), at most once a second and at the
// end of the run.
class PrometheusSink final : public MetricsSink {
 public:
  explicit PrometheusSink(std::filesystem::path path);  // writes the file once. Throws Error
  std::string name() const override { return path_.string(); }
  void record(const MetricsRecord& record) override;
  void close() override;
  std::string text() const;  // contents of the file at its next write

 private:
  void set(std::string_view metric, double value, const std::string& labels = {});
  void take(const MetricsRecord& record);
  void write();

  std::filesystem::path path_;
  // Key: index in the table of metrics, labels
  std::map<std::pair<size_t, std::string>, double> values_;
  std::chrono::steady_clock::time_point last_write_;
};

}  // namespace megatron
