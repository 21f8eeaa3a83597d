#include "megatron/inference/served_weights.h"

#include <chrono>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {

ServedWeights::ServedWeights(ForwardParameterStore& store, WeightReader read, std::string source,
                             int64_t version)
    : store_(store), read_(std::move(read)), source_(std::move(source)), version_(version) {}

std::unique_lock<std::mutex> ServedWeights::hold() {
  std::unique_lock lock(held_);
  if (level_ != MemoryLevel::kKeep) lock.unlock();
  return lock;
}

void ServedWeights::before_moves(std::function<void()> call) {
  const std::lock_guard lock(held_);
  before_moves_ = std::move(call);
}

void ServedWeights::stage(const std::string& source) {
  discard();
  staged_source_ = source;
  reading_ = std::async(std::launch::async, [this, source] { return read_(source); });
}

std::optional<std::string> ServedWeights::staged(int64_t wait_ns) {
  if (!reading_.valid()) return staged_.empty() ? "no weights are being read" : "";
  if (reading_.wait_for(std::chrono::nanoseconds(wait_ns)) != std::future_status::ready)
    return std::nullopt;
  try {
    staged_ = reading_.get();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void ServedWeights::commit(int64_t version) {
  const std::lock_guard lock(held_);
  MEGATRON_CHECK(!staged_.empty() && !is_committed_,
                 "no weights were read to be exchanged for the current ones");
  if (level_ == MemoryLevel::kKeep) {
    if (before_moves_) before_moves_();
    store_.exchange(staged_);
    staged_.clear();
  } else {
    is_committed_ = true;
    parked_.clear();
  }
  source_ = staged_source_;
  version_ = version;
}

void ServedWeights::discard() {
  if (reading_.valid()) reading_.wait();
  reading_ = {};
  if (!is_committed_) staged_.clear();
}

void ServedWeights::suspend(MemoryLevel level) {
  const std::lock_guard lock(held_);
  MEGATRON_CHECK(level != MemoryLevel::kDrop || !source_.empty(),
                 "weights that came from no folder cannot be read again"
                 "\nhint: suspend with the weights kept or offloaded");
  if (level == MemoryLevel::kKeep || level_ != MemoryLevel::kKeep) return;
  if (before_moves_) before_moves_();
  if (level == MemoryLevel::kOffload) {
    parked_ = store_.park();
  } else {
    store_.drop();
  }
  level_ = level;
}

void ServedWeights::resume() {
  const std::lock_guard lock(held_);
  if (level_ == MemoryLevel::kKeep) return;
  if (is_committed_) {
    store_.exchange(staged_);
    staged_.clear();
    is_committed_ = false;
  } else if (level_ == MemoryLevel::kOffload) {
    store_.restore(parked_);
    parked_.clear();
  } else {
    store_.exchange(read_(source_));
  }
  level_ = MemoryLevel::kKeep;
}

}  // namespace megatron
