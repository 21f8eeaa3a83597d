// metrics.jsonl: the metrics of a run, one JSON object per line, appended as they are produced.
//
// Every record has "type" and "time" (seconds since 1970). A resumed run appends; its "start"
// record invalidates earlier "train" and "evaluation" records of iterations after the one it starts
// from.
//   start       iteration, and a summary of the run (device, parameters, tokens per iteration, ...)
//   train       iteration, averages over the iterations since the record before
//   samples     iteration, numbers of samples that training leaves out or cuts, by reason
//   evaluation  iteration, split, set, loss, ppl
//   tokens_per_expert  iteration, counts: of each router, by the name of its module, the tokens
//               that its experts got in that iteration
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
  // Appends to `folder`/metrics.jsonl, after ending a line that a killed writer left unfinished.
  // Throws Error.
  explicit MetricsFile(const std::filesystem::path& folder);
  std::string name() const override { return file_.path().string(); }
  // When this returns, the line is in the file.
  void record(const MetricsRecord& record) override;

 private:
  AppendFile file_;
};

}  // namespace megatron
