#include "megatron/scheduling/block_pool.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {

BlockPool::BlockPool(int32_t blocks) : holds_(static_cast<size_t>(blocks), kFree) {
  free_.reserve(holds_.size());
  for (int32_t block = blocks; block-- > 0;) free_.push_back(block);
}

int32_t& BlockPool::count(int32_t block) {
  MEGATRON_ASSERT(block >= 0 && block < size(), "block ", block, " of ", size());
  return holds_[static_cast<size_t>(block)];
}

int32_t BlockPool::holds(int32_t block) const {
  return std::max(0, holds_.at(static_cast<size_t>(block)));
}

bool BlockPool::is_free(int32_t block) const {
  return holds_.at(static_cast<size_t>(block)) == kFree;
}

std::optional<int32_t> BlockPool::take() {
  if (free_.empty()) return std::nullopt;
  const int32_t block = free_.back();
  free_.pop_back();
  count(block) = 1;
  ++held_;
  return block;
}

void BlockPool::retain(int32_t block) {
  MEGATRON_ASSERT(count(block) > 0, "block ", block, " is not held");
  ++count(block);
}

bool BlockPool::release(int32_t block) {
  MEGATRON_ASSERT(count(block) > 0, "block ", block, " is released and not held");
  if (--count(block) > 0) return false;
  --held_;
  return true;
}

void BlockPool::retain_idle(int32_t block) {
  MEGATRON_ASSERT(count(block) == 0, "block ", block, " is not idle");
  count(block) = 1;
  ++held_;
}

void BlockPool::free(int32_t block) {
  MEGATRON_ASSERT(count(block) == 0, "block ", block, " is freed and not idle");
  count(block) = kFree;
  free_.push_back(block);
}

}  // namespace megatron
