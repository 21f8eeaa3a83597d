// Where a rank's time goes, and how a rank tells the others.
#pragma once

#include <array>
#include <cstdint>

namespace megatron {

// kData: waiting for the next micro-batch. kBackward: with zeroing and adding up gradients.
// kCommunication: what computation waits for, transfers and slow peers alike; what runs under
// computation costs no time. kHost: the rest, from one step to the next, such as logging, as far as
// the device waits for it. kNone: not counted.
enum class Section : uint8_t {
  kData,
  kForward,
  kBackward,
  kCommunication,
  kOptimizer,
  kHost,
  kNone
};
inline constexpr int kNumSections = 6;
const char* section_name(Section section);

// Milliseconds of each section in one step.
using SectionTimes = std::array<double, kNumSections>;

// All but the communication.
double busy_time(const SectionTimes& times);

// As numbers for an all-reduce (max) to which the other ranks bring zeros: two sections in each, in
// microseconds of 31 bits. Never all zero.
inline constexpr int kPackedTimes = kNumSections / 2;
std::array<int64_t, kPackedTimes> pack_times(const SectionTimes& times);
// Whether they hold the times of a rank.
bool unpack_times(const int64_t* packed, SectionTimes& times);

}  // namespace megatron
