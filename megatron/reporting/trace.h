// A timeline of timed regions in the format of chrome://tracing and Perfetto.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace megatron {

// Not thread safe.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;
  void add(const std::string& name, Clock::time_point begin, Clock::time_point end) {
    events_.push_back({name, begin, end});
  }
  void write(const std::filesystem::path& path) const;

 private:
  struct Event {
    std::string name;
    Clock::time_point begin, end;
  };
  std::vector<Event> events_;
};

}  // namespace megatron
