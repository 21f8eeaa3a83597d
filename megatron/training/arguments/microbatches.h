// Number of micro-batches in a global batch, for a constant batch size or one that grows by
// --step-batch-size-schedule.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace megatron {

// From `threshold_samples` consumed samples on, the global batch size is `global_batch_size`.
struct BatchSizeStep {
  int64_t threshold_samples = 0;
  int64_t global_batch_size = 0;
};

// Parses "t0:b0 t1:b1 ..."; thresholds count tokens and take the suffixes K, M, B and T (decimal).
// Throws UsageError.
std::vector<BatchSizeStep> parse_batch_size_schedule(std::string_view text,
                                                     int64_t sequence_length);

class MicrobatchCalculator {
 public:
  struct Options {
    int64_t micro_batch_size = 0;
    int64_t data_parallel_size = 1;
    int64_t global_batch_size = 0;        // used without a schedule
    std::vector<BatchSizeStep> schedule;  // empty: constant
    // Round down to a multiple of micro-batch times data-parallel size
    bool decrease_if_needed = false;
  };
  // Throws UsageError if a size is not divisible, or a schedule does not start at 0, is not
  // ascending, or reduces the batch size.
  explicit MicrobatchCalculator(Options options);

  int64_t global_batch_size(int64_t consumed_samples) const;
  int64_t num_microbatches(int64_t consumed_samples) const;
  // Samples consumed by the first `iterations` iterations.
  int64_t samples_of_iterations(int64_t iterations) const;
  // Full iterations that `samples` samples suffice for.
  int64_t iterations_of_samples(int64_t samples) const;

 private:
  Options options_;
};

}  // namespace megatron
