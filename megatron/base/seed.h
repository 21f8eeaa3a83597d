// Derives seeds for single purposes from the seed of the run. The mapping must never change: data
// order, initial weights and dropout of stored runs depend on it (tests/unit/base/seed_test.cc
// holds its vectors).
//
//   mix(z)        = the finalizer of SplitMix64 (Steele, Lea, Flood 2014)
//   join(h, x)    = mix(h + 0x9E3779B97F4A7C15 + mix(x)), modulo 2^64
//   derive_seed   = join over: FNV-1a (64 bits) of the purpose's bytes, then each number; starting
//                   with h = mix(seed)
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace megatron {

constexpr uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Distinct (seed, purpose, numbers) give seeds that are unrelated in practice.
constexpr uint64_t derive_seed(uint64_t seed, std::string_view purpose,
                               std::initializer_list<uint64_t> numbers = {}) {
  const auto join = [](uint64_t h, uint64_t x) {
    return mix_bits(h + 0x9E3779B97F4A7C15u + mix_bits(x));
  };
  uint64_t hash = 0xCBF29CE484222325u;
  for (const char c : purpose) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  uint64_t h = join(mix_bits(seed), hash);
  for (const uint64_t n : numbers) h = join(h, n);
  return h;
}

}  // namespace megatron
