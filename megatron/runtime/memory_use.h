// Bytes that a process holds, as its allocator and the system count them.
#pragma once

#include <cstdint>

namespace megatron {

// Bytes; zero where the device has no allocator to ask.
struct MemoryUse {
  int64_t reserved = 0, allocated = 0, max_allocated = 0, num_allocations = 0;
  int64_t resident = 0;  // of the process on the host
};

// Resident bytes of this process.
int64_t resident_bytes();

}  // namespace megatron
