#include "megatron/tokenizers/detail/word_cache.h"

#include <algorithm>

namespace megatron {

WordCache::WordCache()
    : short_(std::make_unique<Short[]>(size_t{2} << kShortBits)),
      long_(std::make_unique<Long[]>(size_t{2} << kLongBits)) {}

void WordEncoder::encode_rare(const char* begin, size_t length, WordCache::Short* short_set) {
  WordCache::Long* set = nullptr;
  uint64_t key[4] = {};
  if (length <= WordCache::kMaxLong) {
    std::memcpy(key, begin, length);
    key[3] |= static_cast<uint64_t>(length) << 56;
    set = cache_.long_set(mix(mix(key[0], key[1]) ^ key[2], key[3]));
    for (int way = 0; way < 2; ++way) {
      if (std::memcmp(set[way].key, key, sizeof(key)) != 0) continue;
      if (used_ > kBatch - WordCache::kLongIds) flush();
      std::memcpy(batch_ + used_, set[way].ids, sizeof(set[way].ids));
      used_ += set[way].count;
      return;
    }
  }
  flush();
  const size_t before = out_.size();
  model_.encode_word({begin, length}, scratch_, out_);
  const size_t count = out_.size() - before;
  const int32_t* ids = out_.data() + before;
  if (short_set != nullptr && count <= WordCache::kShortIds) {
    short_set[1] = short_set[0];
    std::memcpy(short_set[0].key, load(begin, length).data(), sizeof(short_set[0].key));
    std::copy(ids, ids + count, short_set[0].ids);
    short_set[0].count = static_cast<uint32_t>(count);
  } else if (set != nullptr && count <= WordCache::kLongIds) {
    set[1] = set[0];
    std::memcpy(set[0].key, key, sizeof(key));
    std::copy(ids, ids + count, set[0].ids);
    set[0].count = static_cast<uint32_t>(count);
  }
}

}  // namespace megatron
