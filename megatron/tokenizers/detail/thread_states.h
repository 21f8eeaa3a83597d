// Per-thread memory for the most recently used tokenizers: caches and scratch buffers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace megatron {

// A unique number per tokenizer, so that one at a reused address is recognised as new.
inline uint64_t next_tokenizer_instance() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

// The calling thread's State for a tokenizer; those of the last two tokenizers of a kind are kept.
template <class State>
State& thread_state(uint64_t instance) {
  thread_local std::array<std::pair<uint64_t, std::unique_ptr<State>>, 2> states;
  if (states[0].first != instance) {
    states[0].swap(states[1]);
    if (states[0].first != instance) states[0] = {instance, std::make_unique<State>()};
  }
  return *states[0].second;
}

}  // namespace megatron
