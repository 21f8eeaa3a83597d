// How often a fuzz target runs.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>

namespace megatron {

// Calls body(seed) with seeds 0, 1, ...: `count` times, or for MEGATRON_FUZZ_SECONDS.
inline void repeat_with_seeds(int64_t count, const std::function<void(uint32_t)>& body) {
  const char* text = std::getenv("MEGATRON_FUZZ_SECONDS");
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(text ? std::atol(text) : 0);
  for (int64_t i = 0; text ? std::chrono::steady_clock::now() < end : i < count; ++i)
    body(static_cast<uint32_t>(i));
}

}  // namespace megatron
