// How many micro-batches make a global batch, for a constant batch size or one that grows by a
// schedule (contracts c.5).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// From `threshold_samples` consumed samples on, the global batch has `global_batch_size` samples.
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
    int64_t global_batch_size = 0;        // without a schedule
    std::vector<BatchSizeStep> schedule;  // empty: constant
    // Round down to a multiple of micro-batch times data-parallel size
    bool decrease_if_needed = false;
  };
  // Throws UsageError when a size is not divisible, or a schedule does not start at 0, is not
  // ascending, or shrinks.
  explicit MicrobatchCalculator(Options options);

  int64_t global_batch_size(int64_t consumed_samples) const;
  int64_t num_microbatches(int64_t consumed_samples) const;
  // Samples that `iterations` iterations from the start consume.
  int64_t samples_of_iterations(int64_t iterations) const;
  // Whole iterations that `samples` samples feed.
  int64_t iterations_of_samples(int64_t samples) const;

 private:
  Options options_;
};

}  // namespace megatron
