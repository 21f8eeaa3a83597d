// Renders metrics.jsonl and config.yaml of one or more runs as one self-contained HTML page.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace megatron {

struct TrainPoint {
  int64_t iteration = 0;
  double loss = 0;  // NaN: not finite
  double learning_rate = 0;
  double grad_norm = 0;  // NaN: skipped step
  double tokens_per_second = 0;
  double tflops_per_device = 0;
  double seconds_per_iteration = 0;
  double mfu = 0;  // NaN: the device's peak is not known
  int64_t consumed_samples = 0;
  int64_t consumed_tokens = 0;
  int64_t skipped_iterations = 0;
  int64_t nan_iterations = 0;
};

struct EvaluationPoint {
  int64_t iteration = 0;
  std::string split, set;
  double loss = 0;
  bool at_end = false;  // after training, on other samples than evaluations during training
  double seconds = 0;   // NaN: not known
};

struct CheckpointPoint {
  int64_t iteration = 0;
  int64_t bytes = 0;
  double seconds = 0;
  std::string directory;
};

// Bytes, maximum over ranks; NaN: not known.
struct MemoryPoint {
  int64_t iteration = 0;
  double resident = 0, allocated = 0, max_allocated = 0, reserved = 0;
};

// Where the seconds of an iteration went on several ranks; means over the log intervals.
struct RankSection {
  std::string name;
  double seconds = 0;      // mean over the ranks
  double max_seconds = 0;  // of the rank with most
  int64_t max_rank = 0;    // the one that had most most often
};

// What the experts of one router got in one iteration.
struct ExpertTokens {
  std::string router;
  std::vector<int64_t> tokens;  // by expert
};

using Texts = std::vector<std::pair<std::string, std::string>>;  // names and values, in order

struct RunHistory {
  std::string name;  // shown on a page of several runs
  Texts facts;       // from the latest "start" record; members of objects as "object: member"
  Texts config;      // from config.yaml; empty: no such file
  std::vector<Texts> hosts;                                   // from the latest "start" record
  std::vector<std::pair<std::string, double>> start_seconds;  // stages of the latest start
  // Mean seconds per iteration of the slowest rank, by timer
  std::vector<std::pair<std::string, double>> sections;
  std::vector<RankSection> rank_sections;  // empty: one rank
  int64_t num_starts = 0;
  // By ascending iteration, without those that a resumed run repeated
  std::vector<TrainPoint> train;
  std::vector<EvaluationPoint> evaluations;
  std::vector<CheckpointPoint> checkpoints;
  std::vector<MemoryPoint> memory;
  // Of the latest iteration that was recorded; empty: none was
  std::vector<ExpertTokens> tokens_per_expert;
  int64_t tokens_per_expert_iteration = 0;
  double wall_seconds = 0;  // sum over all starts, from the start to the last record
  std::string end_reason;   // empty: still running, or killed
  int64_t unreadable_lines = 0;

  // The best evaluation during training; if there are none, of those at the end. Null: none.
  const EvaluationPoint* best_validation() const;
  double training_seconds() const;
};

// `folder`: folder of a run, or its metrics.jsonl. Throws Error if there is none.
RunHistory read_run(const std::filesystem::path& folder);

struct ReportOptions {
  std::string title;
  bool log_loss = false;  // logarithmic loss axis
};
// One run in detail, or several compared.
std::string render_report(const std::vector<RunHistory>& runs, const ReportOptions& options);

// The summary of a run as one JSON object.
std::string report_json(const RunHistory& run);

// Names whose values differ between the runs, each with the value of every run ("": it has none).
std::vector<std::pair<std::string, std::vector<std::string>>> differences(
    const std::vector<const Texts*>& runs);

}  // namespace megatron
