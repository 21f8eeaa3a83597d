#include "megatron/training/timers.h"

#include <algorithm>
#include <cstdio>

#include "megatron/base/check.h"

namespace megatron {

Timers::Timers(int level, std::function<void()> synchronize)
    : level_(level), synchronize_(std::move(synchronize)) {}

void Timers::start(std::string_view name, int level) {
  if (level > level_) return;
  auto found = timers_.find(name);
  if (found == timers_.end()) {
    found = timers_.emplace(std::string(name), Timer{}).first;
    found->second.order = static_cast<int64_t>(timers_.size());
  }
  MEGATRON_ASSERT(!found->second.running, "timer ", name, " is already running");
  if (synchronize_) synchronize_();
  found->second.running = true;
  found->second.begin = std::chrono::steady_clock::now();
}

void Timers::stop(std::string_view name) {
  const auto found = timers_.find(name);
  if (found == timers_.end() || !found->second.running) return;
  if (synchronize_) synchronize_();
  const auto end = std::chrono::steady_clock::now();
  found->second.total += end - found->second.begin;
  found->second.running = false;
  if (listener_) listener_(found->first, found->second.begin, end);
}

std::vector<std::pair<std::string, double>> Timers::milliseconds() const {
  std::vector<std::pair<int64_t, std::pair<std::string, double>>> ordered;
  for (const auto& [name, timer] : timers_) {
    const std::chrono::duration<double, std::milli> total = timer.total;
    ordered.push_back({timer.order, {name, total.count()}});
  }
  std::sort(ordered.begin(), ordered.end());
  std::vector<std::pair<std::string, double>> out;
  for (auto& entry : ordered) out.push_back(std::move(entry.second));
  return out;
}

void Timers::reset() {
  for (auto& [name, timer] : timers_) timer.total = {};
}

namespace {

std::string padded(const std::string& name, size_t width) {
  std::string out = name + " ";
  if (out.size() < width) out.append(width - out.size(), '.');
  return out;
}

std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

std::string format_timers(const std::vector<std::string>& names, const std::vector<std::vector<double>>& values,
                          TimingLogOption option, double iterations) {
  const char* heading = option == TimingLogOption::kMax      ? "max time across ranks (ms):"
                        : option == TimingLogOption::kMinMax ? "(min, max) time across ranks (ms):"
                                                             : "times across ranks (ms):";
  std::string out = heading;
  for (size_t i = 0; i < names.size(); ++i) {
    double low = values.at(0).at(i), high = low;
    for (const std::vector<double>& rank : values) {
      low = std::min(low, rank.at(i));
      high = std::max(high, rank.at(i));
    }
    if (option == TimingLogOption::kAll) {
      out += "\n  " + names[i] + ":";
      for (size_t rank = 0; rank < values.size(); ++rank)
        out += "\n     rank " + number("%2.0f", rank) + ": " + number("%.2f", values[rank][i] / iterations);
    } else {
      out += "\n    " + padded(names[i], 48) + ": ";
      out += option == TimingLogOption::kMax
                 ? number("%.2f", high / iterations)
                 : "(" + number("%.2f", low / iterations) + ", " + number("%.2f", high / iterations) + ")";
    }
  }
  return out;
}

}  // namespace megatron
