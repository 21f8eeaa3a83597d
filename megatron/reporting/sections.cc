#include "megatron/reporting/sections.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace megatron {

namespace {

constexpr int64_t kMostMicroseconds = (int64_t{1} << 31) - 1;

}  // namespace

const char* section_name(Section section) {
  static constexpr const char* kNames[] = {"data",      "forward", "backward", "communication",
                                           "optimizer", "host",    "none"};
  return kNames[static_cast<int>(section)];
}

double busy_time(const SectionTimes& times) {
  return std::accumulate(times.begin(), times.end(), 0.0) -
         times[static_cast<int>(Section::kCommunication)];
}

std::array<int64_t, kPackedTimes> pack_times(const SectionTimes& times) {
  const auto microseconds = [&](int section) {
    const double value =
        std::clamp(times[section] * 1e3, 0.0, static_cast<double>(kMostMicroseconds));
    return static_cast<int64_t>(std::llround(value));
  };
  std::array<int64_t, kPackedTimes> packed{};
  for (int i = 0; i < kPackedTimes; ++i)
    packed[i] = (microseconds(2 * i) << 31) | microseconds(2 * i + 1);
  packed[kPackedTimes - 1] = std::max<int64_t>(packed[kPackedTimes - 1], 1);
  return packed;
}

bool unpack_times(const int64_t* packed, SectionTimes& times) {
  if (packed[kPackedTimes - 1] == 0) return false;
  for (int i = 0; i < kPackedTimes; ++i) {
    times[2 * i] = static_cast<double>(packed[i] >> 31) / 1e3;
    times[2 * i + 1] = static_cast<double>(packed[i] & kMostMicroseconds) / 1e3;
  }
  return true;
}

}  // namespace megatron
