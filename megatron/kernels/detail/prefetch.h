#pragma once

namespace megatron {

// Asks for a line of memory that will be read, into the L2 cache: as many of these are on their way
// at once as one core can have. Any address may be named.
inline void fetch_into_l2(const void* address) {
  constexpr int kForReading = 0, kIntoL2 = 2;
  __builtin_prefetch(address, kForReading, kIntoL2);
}

}  // namespace megatron
