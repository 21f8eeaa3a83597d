// Sections of a rank's time, and their encoding for an all-reduce.
#pragma once

#include <array>
#include <cstdint>

namespace megatron {

// kData: waiting for the next micro-batch. kBackward: includes zeroing and accumulating gradients.
// kCommunication: exposed communication, that is, computation waits for transfers or slow peers;
// overlapped communication is not counted. kHost: the rest of a step, such as logging, as far as
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

// Sum of all sections but communication.
double busy_time(const SectionTimes& times);

// Encodes the times for a max-all-reduce in which the other ranks contribute zeros: two sections
// per number, in microseconds of 31 bits. Never all zero.
inline constexpr int kPackedTimes = kNumSections / 2;
std::array<int64_t, kPackedTimes> pack_times(const SectionTimes& times);
// Decodes; returns false if no rank contributed times.
bool unpack_times(const int64_t* packed, SectionTimes& times);

// So many ranks report in one step at most, the others in the steps that follow: in a round of so
// many steps each rank has its turn.
inline constexpr int kReportedRanks = 512;
constexpr int steps_per_report(int num_ranks) {
  return (num_ranks + kReportedRanks - 1) / kReportedRanks;
}

}  // namespace megatron
