#include "megatron/scheduling/cache_blocks.h"

#include <algorithm>

#include "megatron/base/check.h"

namespace megatron {

CacheBlocks::CacheBlocks(const Options& options)
    : pool_(options.blocks),
      index_(options.blocks, options.block_size, options.max_idle_share, options.hash),
      record_freed_(options.record_freed) {}

void CacheBlocks::free(int32_t block) {
  pool_.free(block);
  if (record_freed_) freed_.push_back(block);
}

int32_t CacheBlocks::take() {
  if (pool_.num_free() == 0) {
    std::vector<int32_t> evicted;
    index_.evict(evicted);
    for (const int32_t block : evicted) free(block);
  }
  const std::optional<int32_t> block = pool_.take();
  MEGATRON_ASSERT(block, "no block is available");
  return *block;
}

void CacheBlocks::retain(int32_t block) {
  if (pool_.holds(block) > 0) {
    pool_.retain(block);
  } else {
    pool_.retain_idle(block);
    index_.set_idle(block, false);
  }
}

void CacheBlocks::release(int32_t block, int64_t after) {
  if (after <= ended_)
    release_now(block);
  else
    pending_.emplace_back(after, block);
}

void CacheBlocks::release_now(int32_t block) {
  if (!pool_.release(block)) return;
  if (index_.contains(block))
    index_.set_idle(block, true);
  else
    free(block);
}

void CacheBlocks::step_ended(int64_t step) {
  ended_ = std::max(ended_, step);
  std::erase_if(pending_, [&](const auto& waiting) {
    if (waiting.first > ended_) return false;
    release_now(waiting.second);
    return true;
  });
}

void CacheBlocks::forget_prefixes() {
  std::vector<int32_t> idle;
  index_.clear(idle);
  for (const int32_t block : idle) free(block);
}

}  // namespace megatron
