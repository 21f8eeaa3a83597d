// Named timers with levels (--timing-log-level) and their report (--timing-log-option).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

class SectionClock;

// Used by the training loop; not thread safe.
class Timers {
 public:
  // Timers above `level` cost one comparison. `synchronize` is called at both ends of a timed
  // region, to wait for the device; may be empty.
  explicit Timers(int level, std::function<void()> synchronize = {});

  void start(std::string_view name, int level);
  void stop(std::string_view name);
  // Milliseconds summed since the last reset, per timer, in the order of first use.
  std::vector<std::pair<std::string, double>> milliseconds() const;
  void reset();

  // Called with (name, start, end) of every timed region, for traces.
  using Listener = std::function<void(const std::string&, std::chrono::steady_clock::time_point,
                                      std::chrono::steady_clock::time_point)>;
  void set_listener(Listener listener) { listener_ = std::move(listener); }

  // The clock that Region reports sections to; null: none.
  SectionClock* sections() const { return sections_; }
  void set_sections(SectionClock* sections) { sections_ = sections; }

 private:
  struct Timer {
    bool running = false;
    std::chrono::steady_clock::time_point begin;
    std::chrono::steady_clock::duration total{};
    int64_t order = 0;
  };
  int level_;
  std::function<void()> synchronize_;
  std::map<std::string, Timer, std::less<>> timers_;
  Listener listener_;
  SectionClock* sections_ = nullptr;
};

// Times a scope.
class ScopedTimer {
 public:
  ScopedTimer(Timers& timers, std::string_view name, int level) : timers_(timers), name_(name) {
    timers_.start(name_, level);
  }
  ~ScopedTimer() { timers_.stop(name_); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  Timers& timers_;
  std::string name_;
};

enum class TimingLogOption { kMax, kMinMax, kAll };

// The timers of all ranks; 0 if a rank does not have one.
struct RankTimers {
  std::vector<std::string> names;
  std::vector<std::vector<double>> values;  // [rank][timer], milliseconds
  double longest(size_t timer) const;
};
// Parses the texts of all ranks (timers_to_text), in rank order.
std::string timers_to_text(const Timers& timers);
RankTimers timers_from_texts(const std::vector<std::string>& texts);

// One line per timer under a heading, per-rank values divided by `iterations`. `values[r]`:
// milliseconds of rank r. As in Megatron-LM, ranks where a timer is zero are ignored in its minimum
// and not listed.
std::string format_timers(const std::vector<std::string>& names,
                          const std::vector<std::vector<double>>& values, TimingLogOption option,
                          double iterations);

}  // namespace megatron
