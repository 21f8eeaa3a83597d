#include "megatron/scheduling/commands.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

std::optional<CommandOutcome> Ticket::outcome() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->outcome;
}

CommandOutcome Ticket::wait() const {
  std::unique_lock lock(shared_->mutex);
  shared_->known.wait(lock, [&] { return shared_->outcome.has_value(); });
  return *shared_->outcome;
}

void Ticket::then(std::function<void(const CommandOutcome&)> then) const {
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->outcome) {
      shared_->then.push_back(std::move(then));
      return;
    }
  }
  then(*shared_->outcome);  // is not written again
}

void Ticket::resolve(CommandOutcome outcome) const {
  std::vector<std::function<void(const CommandOutcome&)>> waiting;
  {
    const std::lock_guard lock(shared_->mutex);
    MEGATRON_ASSERT(!shared_->outcome, "a ticket has two outcomes");
    shared_->outcome = std::move(outcome);
    waiting.swap(shared_->then);
  }
  shared_->known.notify_all();
  for (const auto& call : waiting) call(*shared_->outcome);
}

void DurationHistogram::add(int64_t ns) {
  MEGATRON_ASSERT(ns >= 0, "a duration of ", ns, " ns");
  const auto units = static_cast<uint64_t>(ns > 0 ? (ns - 1) / bound_ns(0) : 0);
  ++buckets_[std::min<size_t>(kBuckets, static_cast<size_t>(std::bit_width(units)))];
  ++count_;
  sum_ns_ += ns;
}

}  // namespace megatron
