// What a run says while it trains: log lines, timers and profiles.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "megatron/base/fields.h"
#include "megatron/reporting/timers.h"

namespace megatron {

struct LoggingConfig {
  int64_t log_interval = 100;
  bool log_throughput = false, log_params_norm = false, log_num_zeros_in_grad = false;
  bool log_progress = false;
  std::optional<int64_t> log_memory_interval, save_tokens_per_expert_interval;
  int64_t timing_log_level = 0;
  TimingLogOption timing_log_option = TimingLogOption::kMinMax;
  bool profile = false;
  int64_t profile_step_start = 10, profile_step_end = 12;
  std::vector<int64_t> profile_ranks = {0};

  void fields(FieldVisitor& visitor);
  void validate(Violations& v) const;
};

}  // namespace megatron
