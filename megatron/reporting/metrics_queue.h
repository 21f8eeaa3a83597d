// The way from the training thread to the sinks: a bounded queue and a thread for each sink, so
// that none of them (a full disk, a file server that hangs) stops or slows training, or another
// sink.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "megatron/reporting/metrics_sink.h"

namespace megatron {

// One writing thread. Records are written within milliseconds, in order; a crash loses at most what
// is still queued.
class MetricsQueue {
 public:
  struct Options {
    // Records per sink; when it is full, new ones are dropped and counted
    size_t capacity = 4096;
    double patience_seconds = 20;  // close() gives up on a sink that takes nothing for so long
  };

  MetricsQueue();  // nobody reads
  explicit MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks);
  MetricsQueue(std::vector<std::unique_ptr<MetricsSink>> sinks, Options options);
  MetricsQueue(MetricsQueue&&) noexcept;
  MetricsQueue& operator=(MetricsQueue&&) noexcept;
  ~MetricsQueue();  // close()

  bool is_open() const { return !lanes_.empty(); }
  bool takes_scalars() const;
  // Opens a record, to be completed and passed to write().
  MetricsRecord begin(std::string_view type) const { return MetricsRecord(type); }
  // Returns at once. Records of the types start and end are never dropped.
  void write(MetricsRecord record);
  void write(ScalarSet scalars);
  // Waits until everything written so far has reached the sinks, or a sink takes nothing for so
  // long as patience lasts.
  void flush();
  // flush(), then ends the threads; says how many records are missing from which sink.
  void close();

 private:
  class Lane;
  std::vector<std::shared_ptr<Lane>> lanes_;
};

}  // namespace megatron
