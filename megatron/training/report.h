// What a run has reported, read back from metrics.jsonl, as one HTML page that needs no network.
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
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  int64_t skipped_iterations = 0;
  int64_t nan_iterations = 0;
};

struct EvaluationPoint {
  int64_t iteration = 0;
  std::string split, set;
  double loss = 0;
};

struct CheckpointPoint {
  int64_t iteration = 0;
  int64_t bytes = 0;
  double seconds = 0;
  std::string directory;
};

struct RunHistory {
  std::vector<std::pair<std::string, std::string>> facts;  // of the latest start, in order
  int64_t num_starts = 0;
  std::vector<TrainPoint> train;  // by ascending iteration, without what a later resume has redone
  std::vector<EvaluationPoint> evaluations;
  std::vector<CheckpointPoint> checkpoints;
  std::string end_reason;  // empty: still running, or killed
  int64_t unreadable_lines = 0;

  const EvaluationPoint* best_validation() const;  // null: none
  double training_seconds() const;
};

// Throws Error when the folder holds no metrics.jsonl.
RunHistory read_run(const std::filesystem::path& folder);

struct ReportOptions {
  std::string title;
  bool log_loss = false;  // logarithmic loss axis
};
std::string render_report(const RunHistory& run, const ReportOptions& options);

// The summary as one JSON object.
std::string report_json(const RunHistory& run);

}  // namespace megatron
