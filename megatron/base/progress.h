// A progress bar with rate and ETA: "reading corpus.jsonl  43%  1.2 GB of 2.8 GB  31.0 MB/s  ETA
// 0:52". Drawn on the status line of a terminal (base/log.h); one line is logged when it is done.
// Thread safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace megatron {

class ProgressBar {
 public:
  // `total` 0: unknown. `unit` is "B" (printed as kB, MB, ...) or a noun ("documents").
  ProgressBar(std::string title, uint64_t total, std::string unit);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void advance(uint64_t amount);
  void finish();  // draws the last state and ends the line; called by the destructor too

 private:
  std::string line(bool last) const;
  std::string title_, unit_;
  uint64_t total_;
  std::atomic<uint64_t> done_{0};
  std::chrono::steady_clock::time_point start_, last_draw_;
  std::mutex mutex_;
  bool finished_ = false;
  bool terminal_;
};

}  // namespace megatron
