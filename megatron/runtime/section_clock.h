// Measures how a rank's time is divided over sections of a step, without synchronising the GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>

#include "megatron/comm/wait_listener.h"
#include "megatron/reporting/sections.h"

namespace megatron {

// At any time one section is current, and time is attributed to it. On a CPU the clock is read. On
// a GPU an event is recorded on the current stream whenever the section changes, and the times
// between events are read after the device has passed them. To cost at most about 0.1% of a step,
// steps with very many events are timed only every few steps.
//
// As WaitListener of the world group it counts waits as communication, whatever the current
// section. Waits inside a CUDA graph count as computation. Used by the training thread, and by
// autograd's threads while it runs a backward.
class SectionClock final : public WaitListener {
 public:
  explicit SectionClock(at::Device device);
  ~SectionClock() override;

  // Ends the previous step and begins a new one, in section kHost.
  void begin_step();
  // Makes `section` current, until leave() with the value that enter() returned.
  Section enter(Section section);
  void leave(Section before);
  // Time until resume() is not counted: evaluations, checkpoints.
  void pause() { enter(Section::kNone); }
  void resume() { leave(Section::kHost); }
  // Records no events while muted: during the capture of a CUDA graph.
  void set_muted(bool muted);

  void begin_wait() override;
  void end_wait() override;

  // The mean over the steps since the last call that have ended and that the device has passed.
  // Does not wait.
  std::optional<SectionTimes> take();
  // Counter of reports; equal on all ranks.
  int64_t next_report();

  // For tests and measurements: called at the end of each section, before its time is taken.
  void set_delay(std::function<void(Section)> delay);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Makes a section current for a scope; no-op without a clock.
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
