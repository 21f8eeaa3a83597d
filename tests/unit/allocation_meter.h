// Counts what the CPU's allocator gives and takes back.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megatron/tensor/torch.h"

namespace megatron {

// On the thread for which it is installed (c10::ThreadLocalDebugInfo). Memory of other owners, host
// copies among it, does not count.
class Meter : public c10::MemoryReportingInfoBase {
 public:
  using c10::MemoryReportingInfoBase::MemoryReportingInfoBase;
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    live += bytes;
    most = std::max(most, live);
  }
  int64_t live = 0, most = 0;
};

}  // namespace megatron
