// Memory that a thread keeps for the tokenizers it used last: caches and scratch buffers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace megatron {

// Tells tokenizers apart, also one that lies where another one lay.
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
