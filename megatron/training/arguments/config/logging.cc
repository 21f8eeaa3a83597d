#include "megatron/training/arguments/config/logging.h"

#include "megatron/base/value_checks.h"

namespace megatron {
namespace {

constexpr std::string_view kTimingOptions[] = {"max", "minmax", "all"};

}  // namespace

void LoggingConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("logging");
  v.field("log_interval", log_interval, "iterations between log lines");
  v.field("log_throughput", log_throughput, "TFLOP/s per GPU in the log line");
  v.field("log_params_norm", log_params_norm, "norm of the parameters in the log line");
  v.field("log_num_zeros_in_grad", log_num_zeros_in_grad,
          "number of zeros in the gradient in the log line");
  v.field("log_progress", log_progress, "append starts, saves and ends to progress.txt in --save");
  v.field("log_memory_interval", log_memory_interval,
          "iterations between reports of memory, the most over all ranks");
  v.field("save_tokens_per_expert_interval", save_tokens_per_expert_interval,
          "iterations between records of how many tokens each expert of each layer got, in "
          "metrics.jsonl");
  v.field("timing_log_level", timing_log_level,
          "timers: 0 the iteration, 1 its parts, 2 each micro-batch (waits for the device)");
  v.choice(
      "timing_log_option", timing_log_option, kTimingOptions,
      "how timers of several ranks are shown: the longest, the shortest and the longest, or all");
  v.group("profiling");
  v.field("profile", profile,
          "profile some steps: a CUDA profiler range on a GPU, trace.json in the run's folder on a "
          "CPU");
  v.field("profile_step_start", profile_step_start, "first profiled iteration");
  v.field("profile_step_end", profile_step_end, "iteration before which profiling ends");
  v.field("profile_ranks", profile_ranks, "ranks of the job that --profile covers");
}

void LoggingConfig::validate(Violations& v) const {
  at_least(v, "--log-interval", log_interval, 1);
  at_least(v, "--log-memory-interval", log_memory_interval, 1);
  at_least(v, "--save-tokens-per-expert-interval", save_tokens_per_expert_interval, 1);
}

}  // namespace megatron
