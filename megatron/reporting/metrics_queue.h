// Passes records from the training thread to the sinks: a bounded queue and a thread per sink, so
// that a blocked sink (a full disk, a file server that hangs) slows neither training nor other
// sinks.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "megatron/reporting/metrics_sink.h"

namespace megatron {

// Used by one thread. Records are written within milliseconds, in order; a crash loses at most what
// is still queued.
class MetricsQueue {
 public:
  struct Options {
    // Records per sink; when it is full, new ones are dropped and counted
    size_t capacity = 4096;
    double patience_seconds = 20;  // close() abandons a sink that makes no progress for this long
  };

  MetricsQueue();  // without sinks
  explicit MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks);
  MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks, Options options);
  MetricsQueue(MetricsQueue&&) noexcept;
  MetricsQueue& operator=(MetricsQueue&&) noexcept;
  ~MetricsQueue();  // close()

  bool is_open() const { return !lanes_.empty(); }
  bool takes_scalars() const;
  // A new record, to be completed and passed to write().
  MetricsRecord begin(std::string_view type) const { return MetricsRecord(type); }
  // Returns at once. Records of the types start and end are never dropped.
  void write(MetricsRecord record);
  void write(ScalarSet scalars);
  // Waits until everything written so far has reached the sinks, but no longer than
  // patience_seconds for a sink that makes no progress.
  void flush();
  // flush(), then ends the threads; logs how many records each sink has missed.
  void close();

 private:
  class Lane;
  std::vector<std::shared_ptr<Lane>> lanes_;
};

}  // namespace megatron
