// The blocks of one device's cache: free ones, those that sequences hold, and those that are kept
// for the prefixes that they hold.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "megatron/scheduling/block_pool.h"
#include "megatron/scheduling/prefix_index.h"

namespace megatron {

class CacheBlocks {
 public:
  struct Options {
    int32_t blocks = 0;
    int64_t block_size = 0;
    double max_idle_share = 1.0;  // PrefixIndex
    PrefixIndex::Hash hash = hash_prefix;
    bool record_freed = false;  // for take_freed()
  };
  explicit CacheBlocks(const Options& options);

  // Blocks that take() can give: free, or kept for their prefix alone.
  int32_t num_available() const { return pool_.num_free() + pool_.num_idle(); }
  // Those that become available when steps in flight end.
  int32_t num_pending() const { return static_cast<int32_t>(pending_.size()); }

  // Held once from now on; forgets the least recently used prefixes as needed.
  int32_t take();
  void retain(int32_t block);  // held, or kept for its prefix
  // Ends one hold when step `after` has ended.
  void release(int32_t block, int64_t after);
  // Results of all steps up to this one were read.
  void step_ended(int64_t step);

  const PrefixIndex& index() const { return index_; }
  PrefixNode root(const PrefixIdentity& identity) { return index_.root(identity); }
  PrefixNode add(PrefixNode parent, std::span<const int32_t> tokens, int32_t block) {
    return index_.add(parent, tokens, block);
  }
  void forget_prefixes();

  const BlockPool& pool() const { return pool_; }
  // Blocks that became free since the last call.
  std::vector<int32_t> take_freed() { return std::exchange(freed_, {}); }
  // Blocks that are waiting for a step, with it.
  const std::deque<std::pair<int64_t, int32_t>>& pending() const { return pending_; }

 private:
  void release_now(int32_t block);
  void free(int32_t block);

  BlockPool pool_;
  PrefixIndex index_;
  std::deque<std::pair<int64_t, int32_t>> pending_;
  int64_t ended_ = 0;
  bool record_freed_;
  std::vector<int32_t> freed_;
};

}  // namespace megatron
