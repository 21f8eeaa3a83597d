// metrics.jsonl: what a run reports, one JSON object per line, appended as it happens.
//
// Every record has "type" and "time" (seconds since 1970). A resumed run appends; its "start"
// record makes older "train" and "evaluation" records beyond the iteration it starts from void.
//   start       iteration, and a summary of the run (device, parameters, tokens per iteration, ...)
//   train       iteration, averages over the iterations since the record before
//   evaluation  iteration, split, set, loss, ppl
//   checkpoint  iteration, bytes, seconds, directory
//   end         iteration, reason
#pragma once

#include <filesystem>

#include "megatron/base/append_file.h"
#include "megatron/reporting/metrics_sink.h"

namespace megatron {

inline constexpr const char* kMetricsName = "metrics.jsonl";

class MetricsFile final : public MetricsSink {
 public:
  // Appends to `folder`/metrics.jsonl; a line that a killed writer left unfinished is ended first.
  // Throws Error.
  explicit MetricsFile(const std::filesystem::path& folder);
  std::string name() const override { return file_.path().string(); }
  // The line is in the file when this returns.
  void record(const MetricsRecord& record) override;

 private:
  AppendFile file_;
};

}  // namespace megatron
