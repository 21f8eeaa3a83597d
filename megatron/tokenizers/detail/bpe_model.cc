#include "megatron/tokenizers/detail/bpe_model.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Up to this many symbols a linear search for the best pair is quicker than a heap.
constexpr size_t kMaxShortSymbols = 40;

}  // namespace

WordCache::WordCache()
    : short_(std::make_unique<Short[]>(size_t{2} << kShortBits)),
      long_(std::make_unique<Long[]>(size_t{2} << kLongBits)) {}

BpeModel::BpeModel(BpeData data) : data_(std::move(data)) {
  const size_t slots = std::bit_ceil(std::max<size_t>(16, data_.merges.size() * 2));
  slots_.assign(slots, Slot{kEmptyPair, 0, 0});
  mask_ = slots - 1;
  shift_ = 64 - std::countr_zero(slots);
  for (size_t rank = 0; rank < data_.merges.size(); ++rank) {
    insert_merge(data_.merges[rank], static_cast<uint32_t>(rank));
  }
  if (data_.ignore_merges) {
    words_.reserve(data_.tokens.size());
    for (size_t id = 0; id < data_.tokens.size(); ++id) {
      if (data_.is_word[id]) words_.emplace(data_.tokens[id], static_cast<int32_t>(id));
    }
  }
}

// Of equal pairs the last one counts, as in the `tokenizers` package.
void BpeModel::insert_merge(const BpeData::Merge& merge, uint32_t rank) {
  const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(merge.left)) << 32 |
                        static_cast<uint32_t>(merge.right);
  uint64_t at = (pair * 0x9e3779b97f4a7c15u) >> shift_;
  while (slots_[at].pair != kEmptyPair && slots_[at].pair != pair) at = (at + 1) & mask_;
  slots_[at] = {pair, rank, merge.result};
}

void BpeModel::initial_ids(std::string_view word, std::vector<int32_t>& ids) const {
  ids.clear();
  bool unknown_before = false;
  for (const char c : word) {
    const int32_t id = data_.byte_ids[static_cast<unsigned char>(c)];
    if (id < 0) {
      MEGATRON_CHECK(data_.unknown >= 0, "the tokenizer's vocabulary has no token for byte ",
                     static_cast<int>(static_cast<unsigned char>(c)), " and no unk_token");
      if (!unknown_before || !data_.fuse_unknown) ids.push_back(data_.unknown);
    } else {
      ids.push_back(id);
    }
    unknown_before = id < 0;
  }
}

void BpeModel::encode_word(std::string_view word, Scratch& scratch,
                           std::vector<int32_t>& out) const {
  if (data_.ignore_merges) {
    const auto found = words_.find(word);
    if (found != words_.end()) {
      out.push_back(found->second);
      return;
    }
  }
  initial_ids(word, scratch.ids);
  if (scratch.ids.size() <= kMaxShortSymbols) {
    merge_short(scratch.ids.data(), scratch.ids.size(), out);
  } else {
    merge_long(scratch, out);
  }
}

void BpeModel::merge_short(const int32_t* initial, size_t count, std::vector<int32_t>& out) const {
  int32_t ids[kMaxShortSymbols], results[kMaxShortSymbols];
  uint32_t ranks[kMaxShortSymbols];  // of the pair (i, i + 1)
  std::copy(initial, initial + count, ids);
  for (size_t i = 0; i + 1 < count; ++i) ranks[i] = find_merge(ids[i], ids[i + 1], results[i]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) best = ranks[i] < ranks[best] ? i : best;
    if (ranks[best] == kNoRank) break;
    ids[best] = results[best];
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      if (i + 1 < count) {
        ranks[i] = ranks[i + 1];
        results[i] = results[i + 1];
      }
    }
    if (best + 1 < count) ranks[best] = find_merge(ids[best], ids[best + 1], results[best]);
    if (best > 0) ranks[best - 1] = find_merge(ids[best - 1], ids[best], results[best - 1]);
  }
  out.insert(out.end(), ids, ids + count);
}

// Symbols are a linked list; the heap holds (rank, position), stale when the position's rank has
// changed since.
void BpeModel::merge_long(Scratch& s, std::vector<int32_t>& out) const {
  const size_t count = s.ids.size();
  MEGATRON_CHECK(count < (size_t{1} << 31), "a word of ", count, " bytes is too long to encode");
  const auto end = static_cast<int32_t>(count);
  s.next.resize(count);
  s.previous.resize(count);
  s.rank.resize(count);
  s.result.resize(count);
  s.heap.clear();
  const auto rate = [&](int32_t i) {
    s.rank[i] = s.next[i] < end ? find_merge(s.ids[i], s.ids[s.next[i]], s.result[i]) : kNoRank;
    return s.rank[i] != kNoRank;
  };
  const auto entry = [&](int32_t i) {
    return static_cast<uint64_t>(s.rank[i]) << 32 | static_cast<uint32_t>(i);
  };
  for (int32_t i = 0; i < end; ++i) {
    s.next[i] = i + 1;
    s.previous[i] = i - 1;
  }
  for (int32_t i = 0; i < end; ++i) {
    if (rate(i)) s.heap.push_back(entry(i));
  }
  std::make_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  const auto push = [&](int32_t i) {
    if (!rate(i)) return;
    s.heap.push_back(entry(i));
    std::push_heap(s.heap.begin(), s.heap.end(), std::greater<>());
  };
  while (!s.heap.empty()) {
    const uint64_t top = s.heap.front();
    std::pop_heap(s.heap.begin(), s.heap.end(), std::greater<>());
    s.heap.pop_back();
    const auto at = static_cast<int32_t>(top & 0xffffffffu);
    if (s.rank[at] != static_cast<uint32_t>(top >> 32)) continue;
    const int32_t gone = s.next[at];
    s.ids[at] = s.result[at];
    s.rank[gone] = kNoRank;
    s.next[at] = s.next[gone];
    if (s.next[at] < end) s.previous[s.next[at]] = at;
    push(at);
    if (s.previous[at] >= 0) push(s.previous[at]);
  }
  for (int32_t i = 0; i < end; i = s.next[i]) out.push_back(s.ids[i]);
}

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
