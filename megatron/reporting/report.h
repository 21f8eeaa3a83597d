// What runs have reported, read back from metrics.jsonl and config.yaml, as one HTML page that
// needs no network.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megatron {

struct TrainPoint {
  int64_t iteration = 0;
  double loss = 0;  // NaN when it was not finite
  double learning_rate = 0;
  double grad_norm = 0;  // NaN after a skipped step
  double tokens_per_second = 0;
  double tflops_per_device = 0;
  double seconds_per_iteration = 0;
  double mfu = 0;  // NaN where the device's peak is not known
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  int64_t skipped_iterations = 0;
  int64_t nan_iterations = 0;
};

struct EvaluationPoint {
  int64_t iteration = 0;
  std::string split, set;
  double loss = 0;
  bool at_end = false;  // after training, on other samples than those between iterations
  double seconds = 0;   // NaN: not known
};

struct CheckpointPoint {
  int64_t iteration = 0;
  int64_t bytes = 0;
  double seconds = 0;
  std::string directory;
};

// Bytes, the most of any rank; NaN where there are none.
struct MemoryPoint {
  int64_t iteration = 0;
  double resident = 0, allocated = 0, max_allocated = 0, reserved = 0;
};

using Texts = std::vector<std::pair<std::string, std::string>>;  // names and values, in order

struct RunHistory {
  std::string name;          // on a page of several runs
  Texts facts;               // of the latest start; members of objects as "object: member"
  Texts config;              // config.yaml; empty when there is none
  std::vector<Texts> hosts;  // of the latest start
  std::vector<std::pair<std::string, double>> start_seconds;  // stages of the latest start
  // Mean seconds of an iteration, of the slowest rank, by timer
  std::vector<std::pair<std::string, double>> sections;
  int64_t num_starts = 0;
  std::vector<TrainPoint> train;  // by ascending iteration, without what a later resume has redone
  std::vector<EvaluationPoint> evaluations;
  std::vector<CheckpointPoint> checkpoints;
  std::vector<MemoryPoint> memory;
  double wall_seconds = 0;  // of all starts, from the start to the last record
  std::string end_reason;   // empty: still running, or killed
  int64_t unreadable_lines = 0;

  // Of those between iterations; where there are none, of those at the end. Null: none.
  const EvaluationPoint* best_validation() const;
  double training_seconds() const;
};

// `folder` is that of a run, or its metrics.jsonl. Throws Error when there is none.
RunHistory read_run(const std::filesystem::path& folder);

struct ReportOptions {
  std::string title;
  bool log_loss = false;  // logarithmic loss axis
};
// One run in full, or several side by side.
std::string render_report(const std::vector<RunHistory>& runs, const ReportOptions& options);

// The summary of a run as one JSON object.
std::string report_json(const RunHistory& run);

// Names under which the values of the runs differ, each with the value of every run ("" where it
// has none).
std::vector<std::pair<std::string, std::vector<std::string>>> differences(
    const std::vector<const Texts*>& runs);

}  // namespace megatron
