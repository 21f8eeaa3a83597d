// Reporting of a run during training: log lines, the status line, TensorBoard, metrics.jsonl.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/reporting/log_line.h"
#include "megatron/reporting/metrics_queue.h"
#include "megatron/reporting/timers.h"
#include "megatron/runtime/memory_use.h"
#include "megatron/training/arguments/training_config.h"

namespace megatron {

struct SectionSummaries;  // reporting/section_means.h

// One finished iteration, as host numbers.
struct StepRecord {
  int64_t iteration = 0;         // counted from 1
  int64_t consumed_samples = 0;  // after this iteration
  int64_t global_batch_size = 0;
  double loss = 0;           // mean over the weighted tokens
  bool skipped = false;      // no weights were updated
  bool non_finite = false;   // not finite, and not because of the loss scale
  double learning_rate = 0;  // that of the next step, as Megatron-LM logs it
  double loss_scale = 1;
  double grad_norm = 0;
  std::optional<int64_t> num_zeros;
  std::optional<double> params_norm;
  // of the task, and auxiliary losses
  std::vector<std::pair<std::string, double>> metrics;
  // What it read, such as images; logged by second
  std::vector<std::pair<std::string, int64_t>> counts;
};

struct EvaluationRecord {
  int64_t iteration = 0;
  int64_t consumed_samples = 0;
  std::string split = "validation";
  int set_index = -1;  // which of several validation sets; -1: the only one
  std::string set_name;
  // --validation-set-names is given: log line and TensorBoard show the name, not the index
  bool set_is_named = false;
  bool at_end = false;  // after training, not between iterations
  std::string where;    // "iteration 100"
  double loss = 0;
  std::vector<std::pair<std::string, double>> metrics;  // of the task
};

// The memory line: "memory (MB) | allocated: ... | ..."; of several ranks the largest of each
// number, and whose it is.
std::string format_memory(const std::vector<MemoryUse>& ranks);
// Constants of the run.
struct RunFacts {
  int64_t train_iters = 0;
  int64_t start_iteration = 0;
  int64_t sequence_length = 0;
  int64_t world_size = 1;
  std::string loss_name = "lm loss";
  bool loss_per_token = true;  // so perplexities are logged
  double peak_flops = 0;       // FLOP/s of one device; 0: not known
  double flops_per_token = 0;  // in training
};

// Not thread safe. Keeps references to the configuration, which must outlive it.
class TrainingLog {
 public:
  // `metrics`: the sinks of open_sinks() on the first rank; empty on the others.
  TrainingLog(const TrainingConfig& config, RunFacts facts, MetricsQueue metrics = {});
  ~TrainingLog();

  // Time between pause() and resume() does not count as training (evaluation, checkpoints). The
  // time of an evaluation is from pause() or from the previous evaluation until it is reported.
  void pause();
  void resume();

  // Call after each iteration. Prints every --log-interval iterations and after the first. Returns
  // whether it printed.
  bool step(const StepRecord& record);
  void evaluation(const EvaluationRecord& record);
  // Samples of the data that training leaves out or cuts, by reason.
  void left_out(const std::vector<std::pair<std::string, int64_t>>& samples, int64_t iteration);
  // `ranks`: of all ranks, in rank order.
  void memory(const std::vector<MemoryUse>& ranks, int64_t iteration);
  void timers(const RankTimers& timers, int64_t iteration, int64_t iterations);
  // Of the interval that ends with this iteration.
  void sections(const SectionSummaries& sections, int64_t iteration);
  // `counts`: of each name, tokens by expert.
  void tokens_per_expert(const std::vector<std::string>& names,
                         const std::vector<std::vector<int64_t>>& counts, int64_t iteration);
  MetricsQueue& metrics() { return metrics_; }
  // Clears the status line and waits until everything has reached the sinks
  void close();

 private:
  struct Interval {
    int64_t advanced = 0, skipped = 0, non_finite = 0;
    double loss_sum = 0;
    std::vector<std::pair<std::string, double>> metric_sums;
    std::vector<std::pair<std::string, int64_t>> counts;  // also of skipped iterations
    double samples = 0;
    double seconds = 0;
  };
  double seconds_per_iteration() const;
  double step_flops(int64_t samples) const {
    return facts_.flops_per_token * static_cast<double>(samples * facts_.sequence_length);
  }
  TrainingLine line(const StepRecord& record) const;
  void write_metrics(const TrainingLine& line, double seconds_per_iteration);
  void write_scalars(const StepRecord& record, const TrainingLine* line);
  void show_status(const StepRecord& record);
  void take_time();

  const TrainingConfig& config_;
  RunFacts facts_;
  MetricsQueue metrics_;
  Interval interval_;
  bool first_ = true;
  bool paused_ = false;
  // Start of the next evaluation to be reported
  std::chrono::steady_clock::time_point evaluation_begin_;
  std::chrono::steady_clock::time_point mark_;  // time has been counted up to here
  std::chrono::steady_clock::time_point last_status_;
  double step_seconds_ = 0;  // duration of the latest iteration
  // Seconds per iteration, smoothed, for the status line
  double recent_seconds_ = 0;
};

}  // namespace megatron
