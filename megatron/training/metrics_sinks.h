// The sinks that a run's flags ask for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "megatron/reporting/metrics_sink.h"
#include "megatron/training/arguments/training_config.h"

namespace megatron {

// What sinks know of the run besides its records.
struct SinkContext {
  const TrainingConfig& config;
  std::string settings_json;    // the resolved configuration, one JSON object
  int64_t start_iteration = 0;  // above zero: a resumed run
};

// Opens all files; throws Error if one cannot be written.
std::vector<std::unique_ptr<MetricsSink>> open_sinks(const SinkContext& context);

}  // namespace megatron
