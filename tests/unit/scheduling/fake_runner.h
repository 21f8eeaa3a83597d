// Fakes around an engine: a runner with a fake model, a clock that tests set, and faults.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "fake_model.h"
#include "megatron/base/check.h"
#include "megatron/inference/local_links.h"
#include "megatron/inference/step_runner.h"
#include "megatron/scheduling/clock.h"

namespace megatron {

// Stands still unless it is set.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(int64_t now = 0) : now_(now) {}
  int64_t now_ns() const override { return now_.load(); }
  void advance(int64_t ns) { now_ += ns; }

 private:
  std::atomic<int64_t> now_;
};

// What goes wrong with a rank: in the transition or the step that it begins next, once.
struct Fault {
  enum class Kind {
    kNone,
    kRefuse,  // a transition fails and leaves all as it was
    kLate,    // it does not end before `until_ns`
    kThrow,   // the rank fails
  };
  Kind kind = Kind::kNone;
  int64_t until_ns = 0;
  bool in_step = false;  // else in a transition
  int skip = 0;          // so many transitions go well before
};

class FakeRunner final : public StepRunner {
 public:
  FakeRunner(const FakeOptions& options, const Clock& clock)
      : options_(options), facts_(options.facts), clock_(clock), model_(options) {}

  void inject(const Fault& fault) { next_fault_ = fault; }
  const RunnerFacts& facts() const override { return facts_; }

  void launch(const StepPlan& plan) override {
    MEGATRON_ASSERT(!busy_, "a step is launched during a transition");
    MEGATRON_ASSERT(on_device_, "a step is launched while the cache or the weights are away");
    MEGATRON_ASSERT(plan.weights_version == version_, "a step names other weights");
    if (next_fault_.in_step) fault_ = std::exchange(next_fault_, {});
    if (fault_.in_step && fault_.kind == Fault::Kind::kThrow) throw_error("the device has failed");
    results_.push_back(model_.apply(plan));
    ++launched_;
  }
  std::optional<StepResult> take(int64_t wait_ns) override {
    if (results_.empty() || late(fault_.in_step, wait_ns)) return std::nullopt;
    StepResult result = std::move(results_.front());
    results_.pop_front();
    return result;
  }

  void begin(const RunnerTransition& transition) override {
    MEGATRON_ASSERT(!busy_ && results_.empty(), "a transition begins while others go on");
    if (!next_fault_.in_step && next_fault_.skip-- <= 0) fault_ = std::exchange(next_fault_, {});
    busy_ = true;
    current_ = transition;
  }
  std::optional<std::string> poll(int64_t wait_ns) override {
    MEGATRON_ASSERT(busy_, "no transition has begun");
    if (late(!fault_.in_step, wait_ns)) return std::nullopt;
    const Fault::Kind kind = fault_.in_step ? Fault::Kind::kNone : fault_.kind;
    fault_ = {};
    busy_ = false;
    if (kind == Fault::Kind::kThrow) throw_error("the rank has failed");
    if (kind == Fault::Kind::kRefuse) return "it cannot";
    std::visit([&](const auto& transition) { apply(transition); }, current_);
    return "";
  }

  bool fault_is_pending() const { return next_fault_.kind != Fault::Kind::kNone; }
  int64_t launched() const { return launched_; }
  int64_t version() const { return version_; }
  bool on_device() const { return on_device_; }
  bool staged() const { return staged_; }
  FakeModel& model() { return model_; }

 private:
  bool late(bool here, int64_t wait_ns) const {
    if (!here || fault_.kind != Fault::Kind::kLate || clock_.now_ns() >= fault_.until_ns)
      return false;
    if (wait_ns > 0)
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min<int64_t>(wait_ns, 1'000'000)));
    return true;
  }

  void apply(const SuspendRunner& suspend) {
    levels_ = suspend.levels;
    on_device_ = levels_.cache == MemoryLevel::kKeep && levels_.weights == MemoryLevel::kKeep;
    if (levels_.cache == MemoryLevel::kDrop) model_.drop_cache();
  }
  void apply(const ResumeRunner&) { on_device_ = true; }
  void apply(const StageWeights&) { staged_ = true; }
  void apply(const CommitWeights& commit) {
    MEGATRON_ASSERT(staged_, "no weights are staged");
    staged_ = false;
    version_ = commit.version;
  }
  void apply(const DiscardWeights&) { staged_ = false; }

  FakeOptions options_;
  RunnerFacts facts_;
  const Clock& clock_;
  FakeModel model_;
  Fault fault_, next_fault_;
  std::deque<StepResult> results_;
  bool busy_ = false, on_device_ = true, staged_ = false;
  SuspendCommand levels_;
  RunnerTransition current_;
  int64_t launched_ = 0;
  int64_t version_ = options_.facts.weights_version;
};

}  // namespace megatron
