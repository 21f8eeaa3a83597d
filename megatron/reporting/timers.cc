#include "megatron/reporting/timers.h"

#include <algorithm>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

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

}  // namespace

double RankTimers::longest(size_t timer) const {
  double most = 0;
  for (const std::vector<double>& rank : values) most = std::max(most, rank.at(timer));
  return most;
}

std::string timers_to_text(const Timers& timers) {
  std::string text;
  for (const auto& [name, milliseconds] : timers.milliseconds())
    text += name + "\t" + format_text("%.17g", milliseconds) + "\n";
  return text;
}

RankTimers timers_from_texts(const std::vector<std::string>& texts) {
  RankTimers all;
  std::map<std::string, size_t> place;
  std::vector<std::map<std::string, double>> ranks;
  for (const std::string& text : texts) {
    std::map<std::string, double>& rank = ranks.emplace_back();
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const size_t tab = line.find('\t');
      const std::string name = line.substr(0, tab);
      rank[name] = std::stod(line.substr(tab + 1));
      if (place.emplace(name, all.names.size()).second) all.names.push_back(name);
    }
  }
  for (const std::map<std::string, double>& rank : ranks) {
    std::vector<double>& row = all.values.emplace_back(all.names.size(), 0.0);
    for (const auto& [name, milliseconds] : rank) row[place.at(name)] = milliseconds;
  }
  return all;
}

std::string format_timers(const std::vector<std::string>& names,
                          const std::vector<std::vector<double>>& values, TimingLogOption option,
                          double iterations) {
  const char* heading = option == TimingLogOption::kMax      ? "max time across ranks (ms):"
                        : option == TimingLogOption::kMinMax ? "(min, max) time across ranks (ms):"
                                                             : "times across ranks (ms):";
  std::string out = heading;
  for (size_t i = 0; i < names.size(); ++i) {
    double low = 0, high = 0;
    for (const std::vector<double>& rank : values) {
      if (rank.at(i) <= 0) continue;
      low = low == 0 ? rank.at(i) : std::min(low, rank.at(i));
      high = std::max(high, rank.at(i));
    }
    if (option == TimingLogOption::kAll) {
      out += "\n  " + names[i] + ":";
      for (size_t rank = 0; rank < values.size(); ++rank)
        if (values[rank][i] > 0)
          out += "\n     rank " + format_text("%2zu", rank) + ": " +
                 format_text("%.2f", values[rank][i] / iterations);
    } else {
      out += "\n    " + padded(names[i], 48) + ": ";
      out += option == TimingLogOption::kMax ? format_text("%.2f", high / iterations)
                                             : "(" + format_text("%.2f", low / iterations) + ", " +
                                                   format_text("%.2f", high / iterations) + ")";
    }
  }
  return out;
}

}  // namespace megatron
