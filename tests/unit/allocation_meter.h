// Counts allocations and frees of the CPU allocator.
#pragma once

#include <algorithm>
#include <cstdint>

#include "megatron/tensor/torch.h"

namespace megatron {

// Counts on the thread for which it is installed (c10::ThreadLocalDebugInfo). Memory of other
// allocators, such as host copies, is not counted.
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
