#include "megatron/training/arguments/microbatches.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "megatron/base/check.h"

namespace megatron {

namespace {

[[noreturn]] void refuse(const std::string& message, const std::string& hint) {
  throw UsageError(message + "\nhint: " + hint);
}

constexpr const char* kForm =
    "write pairs of a threshold in tokens and a batch size, such as \"0:32 10B:64 1T:128\"";

// "10B" -> 10e9.
int64_t parse_threshold(std::string_view text, std::string_view entry) {
  double factor = 1;
  if (!text.empty()) {
    switch (text.back()) {
      case 'K':
      case 'k':
        factor = 1e3;
        break;
      case 'M':
      case 'm':
        factor = 1e6;
        break;
      case 'B':
      case 'b':
        factor = 1e9;
        break;
      case 'T':
      case 't':
        factor = 1e12;
        break;
      default:
        break;
    }
    if (factor > 1) text.remove_suffix(1);
  }
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0)
    refuse(cat("--step-batch-size-schedule: the threshold of \"", entry, "\" is no number"), kForm);
  return static_cast<int64_t>(std::llround(value * factor));
}

}  // namespace

std::vector<BatchSizeStep> parse_batch_size_schedule(std::string_view text,
                                                     int64_t sequence_length) {
  MEGATRON_ASSERT(sequence_length > 0);
  std::vector<BatchSizeStep> steps;
  std::istringstream entries{std::string(text)};
  for (std::string entry; entries >> entry;) {
    const size_t colon = entry.find(':');
    if (colon == std::string::npos)
      refuse(cat("--step-batch-size-schedule: \"", entry, "\" has no colon"), kForm);
    const int64_t tokens = parse_threshold(std::string_view(entry).substr(0, colon), entry);
    const std::string_view size = std::string_view(entry).substr(colon + 1);
    int64_t batch = 0;
    const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), batch);
    if (error != std::errc() || end != size.data() + size.size() || batch <= 0)
      refuse(cat("--step-batch-size-schedule: the batch size of \"", entry,
                 "\" is no positive integer"),
             kForm);
    // A threshold is reached when the consumed samples have at least that many tokens.
    steps.push_back({(tokens + sequence_length - 1) / sequence_length, batch});
  }
  if (steps.empty()) refuse("--step-batch-size-schedule is empty", kForm);
  return steps;
}

MicrobatchCalculator::MicrobatchCalculator(Options options) : options_(std::move(options)) {
  const int64_t unit = options_.micro_batch_size * options_.data_parallel_size;
  MEGATRON_ASSERT(unit > 0);
  const bool constant = options_.schedule.empty();
  if (constant) options_.schedule.push_back({0, options_.global_batch_size});
  const char* flag = constant ? "--global-batch-size " : "--step-batch-size-schedule: batch size ";
  for (size_t i = 0; i < options_.schedule.size(); ++i) {
    BatchSizeStep& step = options_.schedule[i];
    const int64_t given = step.global_batch_size;
    if (constant && options_.decrease_if_needed) step.global_batch_size -= given % unit;
    if (step.global_batch_size <= 0 || step.global_batch_size % unit != 0) {
      refuse(
          cat(flag, given, " is not divisible by --micro-batch-size ", options_.micro_batch_size,
              " times the data-parallel size ", options_.data_parallel_size),
          cat("give a multiple of ", unit, constant ? ", or --decrease-batch-size-if-needed" : ""));
    }
    if (i == 0 && step.threshold_samples != 0)
      refuse("--step-batch-size-schedule does not start at 0", kForm);
    if (i > 0 && step.threshold_samples <= options_.schedule[i - 1].threshold_samples)
      refuse("--step-batch-size-schedule: thresholds do not ascend", kForm);
    if (i > 0 && step.global_batch_size < options_.schedule[i - 1].global_batch_size)
      refuse(cat("--step-batch-size-schedule: the batch size shrinks from ",
                 options_.schedule[i - 1].global_batch_size, " to ", step.global_batch_size),
             "batch sizes may only grow during a run");
  }
}

int64_t MicrobatchCalculator::global_batch_size(int64_t consumed_samples) const {
  int64_t size = options_.schedule.front().global_batch_size;
  for (const BatchSizeStep& step : options_.schedule)
    if (step.threshold_samples <= consumed_samples) size = step.global_batch_size;
  return size;
}

int64_t MicrobatchCalculator::num_microbatches(int64_t consumed_samples) const {
  return global_batch_size(consumed_samples) /
         (options_.micro_batch_size * options_.data_parallel_size);
}

int64_t MicrobatchCalculator::samples_of_iterations(int64_t iterations) const {
  int64_t consumed = 0;
  for (size_t i = 0; i < options_.schedule.size() && iterations > 0; ++i) {
    const int64_t size = options_.schedule[i].global_batch_size;
    int64_t steps = iterations;
    if (i + 1 < options_.schedule.size()) {
      const int64_t left = options_.schedule[i + 1].threshold_samples - consumed;
      steps = std::min(iterations, left <= 0 ? 0 : (left + size - 1) / size);
    }
    consumed += steps * size;
    iterations -= steps;
  }
  return consumed;
}

int64_t MicrobatchCalculator::iterations_of_samples(int64_t samples) const {
  int64_t consumed = 0, iterations = 0;
  for (size_t i = 0; i < options_.schedule.size(); ++i) {
    const int64_t size = options_.schedule[i].global_batch_size;
    const bool last = i + 1 == options_.schedule.size();
    int64_t steps = (samples - consumed) / size;
    if (!last) {
      const int64_t left = options_.schedule[i + 1].threshold_samples - consumed;
      steps = std::min(steps, left <= 0 ? 0 : (left + size - 1) / size);
    }
    consumed += steps * size;
    iterations += steps;
  }
  return iterations;
}

}  // namespace megatron
