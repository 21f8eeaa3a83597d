#include "megatron/base/progress.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/format.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

using std::chrono::steady_clock;
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

std::string amount(double value, const std::string& unit) {
  if (unit == "B") return format_bytes(value);
  return format_count(static_cast<uint64_t>(std::llround(value))) + " " + unit;
}

}  // namespace

ProgressBar::ProgressBar(std::string title, uint64_t total, std::string unit)
    : title_(std::move(title)),
      unit_(std::move(unit)),
      total_(total),
      start_(steady_clock::now()),
      last_draw_(start_),
      terminal_(is_terminal()) {}

ProgressBar::~ProgressBar() { finish(); }

void ProgressBar::advance(uint64_t amount) {
  done_.fetch_add(amount, std::memory_order_relaxed);
  if (!terminal_) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || finished_) return;
  const auto now = steady_clock::now();
  if (now - last_draw_ < kRedrawInterval) return;
  last_draw_ = now;
  set_status_line(line(false));
}

void ProgressBar::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (terminal_) set_status_line("");
  log_info(line(true));
}

std::string ProgressBar::line(bool last) const {
  const auto done = static_cast<double>(done_.load(std::memory_order_relaxed));
  const auto total = static_cast<double>(total_);
  const double seconds = std::chrono::duration<double>(steady_clock::now() - start_).count();
  const double rate = seconds > 0 ? done / seconds : 0;
  std::string text = title_;
  if (total_ > 0 && (!last || done < total)) {
    text += format_text("  %.0f%%", std::floor(100 * std::min(1.0, done / total)));
    const std::string of = " of " + amount(total, unit_);
    text +=
        "  " + (unit_ == "B" ? format_bytes(done) : format_count(static_cast<uint64_t>(done))) + of;
  } else {
    text += "  " + amount(done, unit_);
  }
  text += last ? " in " + format_duration(seconds) : "";
  if (rate > 0) text += "  " + amount(rate, unit_) + "/s";
  if (!last && total_ > 0 && rate > 0)
    text += "  ETA " + format_duration(std::max(0.0, total - done) / rate);
  return text;
}

}  // namespace megatron
