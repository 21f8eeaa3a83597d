// How many times as long as usual a test may take under a sanitizer, and without optimisation where
// lines are counted.
#pragma once

namespace megatron {

#if defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
constexpr int kSlowness = 20;
#elif defined(__SANITIZE_ADDRESS__)
constexpr int kSlowness = 4;
#else
constexpr int kSlowness = 1;
#endif

}  // namespace megatron
