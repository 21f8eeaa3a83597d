// Measures where a rank's time goes, step by step, without making a GPU wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "megatron/comm/wait_listener.h"
#include "megatron/reporting/sections.h"

namespace megatron {

// At any time one section is current; time goes to it. On a CPU it is read from the clock. On a GPU
// an event is recorded on the current stream wherever the section changes, and the times between
// events are read once the device has passed them; so that they cost at most about 0.1% of a step,
// steps with very many events are timed every few steps only.
//
// As the listener of a world it counts waits as communication, whatever section they fall into.
// What a CUDA graph waits for inside counts as computation. Used by the thread that trains, and
// those that run backward passes for it meanwhile.
class SectionClock final : public WaitListener {
 public:
  explicit SectionClock(at::Device device);
  ~SectionClock() override;

  // A step begins, and with it the section kHost; the step before ends.
  void begin_step();
  // What follows counts as `section`, until leave() with what enter() returned.
  Section enter(Section section);
  void leave(Section before);
  // Until resume() no time counts: evaluations, checkpoints.
  void pause() { enter(Section::kNone); }
  void resume() { leave(Section::kHost); }
  // While work is recorded for later, no events are.
  void set_muted(bool muted);

  void begin_wait() override;
  void end_wait() override;

  // The mean of the steps that have ended, and that the device has passed, since the last call.
  // Waits for nothing.
  std::optional<SectionTimes> take();
  // Numbers the reports of this clock, which all ranks send alike.
  int64_t next_report();

  // For tests and measurements: called at the end of each section, before its time is taken.
  void set_delay(std::function<void(Section)> delay);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Counts a scope as a section; nothing without a clock.
class SectionScope {
 public:
  SectionScope(SectionClock* clock, Section section)
      : clock_(section == Section::kNone ? nullptr : clock) {
    if (clock_ != nullptr) before_ = clock_->enter(section);
  }
  ~SectionScope() {
    if (clock_ != nullptr) clock_->leave(before_);
  }
  SectionScope(const SectionScope&) = delete;
  SectionScope& operator=(const SectionScope&) = delete;

 private:
  SectionClock* clock_;
  Section before_ = Section::kNone;
};

}  // namespace megatron
