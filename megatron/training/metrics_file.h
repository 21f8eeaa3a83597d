// metrics.jsonl: what a run reports, one JSON object per line, appended as it happens.
//
// Every record has "type" and "time" (seconds since 1970). A resumed run appends; its "start" record makes older "train" and
// "evaluation" records beyond the iteration it starts from void.
//   start       iteration, and a summary of the run (device, parameters, tokens per iteration, ...)
//   train       iteration, averages over the iterations since the record before
//   evaluation  iteration, split, set, loss, ppl
//   checkpoint  iteration, bytes, seconds, directory
//   end         iteration, reason
#pragma once

#include <filesystem>
#include <fstream>
#include <string_view>

namespace megatron {

class JsonWriter;

inline constexpr const char* kMetricsName = "metrics.jsonl";

class MetricsFile {
 public:
  MetricsFile() = default;  // writes nothing
  // Appends to `folder`/metrics.jsonl; a line that a killed writer left unfinished is ended first. Throws Error.
  explicit MetricsFile(const std::filesystem::path& folder);
  bool is_open() const { return file_.is_open(); }
  // Opens a record: an object with type and time, to be completed and passed to write().
  JsonWriter begin(std::string_view type) const;
  // Ends the object and appends it; the line is in the file when this returns.
  void write(JsonWriter& record);

 private:
  std::ofstream file_;
};

}  // namespace megatron
