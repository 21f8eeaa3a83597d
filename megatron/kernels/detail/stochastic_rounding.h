// Stochastic rounding of fp32 to bf16.
#pragma once

#include <cstdint>

#include "megatron/kernels/detail/math.h"

namespace megatron {

// The bits of one of the two bf16 neighbours of x, with probabilities such that the mean over
// `word` is x. bf16 values and infinities are unchanged; a NaN stays NaN.
MEGATRON_HOST_DEVICE uint16_t round_by_chance(float x, uint32_t word) {
  const uint32_t bits = bits_from_float(x);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const uint32_t nan_bit = (bits & 0x007fffffu) != 0 ? 0x40u : 0u;
  return static_cast<uint16_t>(finite ? (bits + (word & 0xffffu)) >> 16 : (bits >> 16) | nan_bit);
}

}  // namespace megatron
