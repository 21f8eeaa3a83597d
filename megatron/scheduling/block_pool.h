// Blocks of a cache: which are free, and how many lists hold each of the others.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace megatron {

class BlockPool {
 public:
  explicit BlockPool(int32_t blocks);

  // A free block, held once from now on; null: none is free.
  std::optional<int32_t> take();
  void retain(int32_t block);
  // Ends one hold; true: it was the last. The block is then idle: neither held nor free.
  bool release(int32_t block);
  void retain_idle(int32_t block);  // the first hold of an idle block
  void free(int32_t block);         // of an idle block

  int32_t size() const { return static_cast<int32_t>(holds_.size()); }
  int32_t holds(int32_t block) const;  // 0: idle or free
  bool is_free(int32_t block) const;
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_held() const { return held_; }
  int32_t num_idle() const { return size() - num_free() - held_; }

 private:
  static constexpr int32_t kFree = -1;
  int32_t& count(int32_t block);

  std::vector<int32_t> holds_;  // by block; kFree
  std::vector<int32_t> free_;   // the last one is taken next
  int32_t held_ = 0;
};

}  // namespace megatron
