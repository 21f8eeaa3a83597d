// Byte-pair encoding of single words: pieces of text as a pre-tokenizer cuts them.
//
// Merges are applied by rank, the leftmost first among equals. Words of up to 31 bytes are kept in
// a cache of fixed size; short words are merged in registers and the stack, long ones with a heap
// in O(n log n).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace megatron {

// What BPE is made of. Strings are bytes, not the printable spelling of tokenizer.json.
struct BpeData {
  struct Merge {
    int32_t left, right, result;
  };
  std::vector<std::string> tokens;      // bytes by id; empty in gaps
  std::vector<bool> is_word;            // by id: the token can be looked up as a whole word
  std::array<int32_t, 256> byte_ids{};  // -1: the vocabulary lacks the byte
  std::vector<Merge> merges;            // by rank
  bool ignore_merges = false;           // a word that is a token is that token
  int32_t unknown = -1;                 // for bytes that the vocabulary lacks
  bool fuse_unknown = false;            // one id for a run of them
};

// A cache of encoded words, 2-way associative, 3 MiB. Belongs to one thread and one model.
class WordCache {
 public:
  WordCache();

  static constexpr size_t kMaxShort = 15, kMaxLong = 31;
  static constexpr size_t kShortIds = 3, kLongIds = 7;
  struct Short {
    uint64_t key[2];  // the bytes; the last one is the length
    int32_t ids[kShortIds];
    uint32_t count;
  };
  struct Long {
    uint64_t key[4];
    int32_t ids[kLongIds];
    uint32_t count;
  };

  // The two entries where a key may lie.
  Short* short_set(uint64_t hash) { return &short_[(hash >> kShortShift) * 2]; }
  Long* long_set(uint64_t hash) { return &long_[(hash >> kLongShift) * 2]; }

 private:
  static constexpr int kShortBits = 15, kLongBits = 13;
  static constexpr int kShortShift = 64 - kShortBits, kLongShift = 64 - kLongBits;
  std::unique_ptr<Short[]> short_;
  std::unique_ptr<Long[]> long_;
};

// Thread safe but for the caches and scratch memory that callers pass.
class BpeModel {
 public:
  // Memory for merging, kept between words.
  struct Scratch {
    std::vector<int32_t> ids, next, previous, result;
    std::vector<uint32_t> rank;
    std::vector<uint64_t> heap;
  };

  explicit BpeModel(BpeData data);

  const BpeData& data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(data_.tokens.size()); }

  // Appends the ids of one word without a cache. Throws Error for a byte that the vocabulary lacks.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair;
    uint32_t rank;
    int32_t result;
  };
  static constexpr uint32_t kNoRank = ~0u;

  // The rank of merging two tokens, kNoRank when they do not merge.
  uint32_t find_merge(int32_t left, int32_t right, int32_t& result) const {
    const uint64_t pair =
        static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    for (uint64_t at = (pair * 0x9e3779b97f4a7c15u) >> shift_;; at = (at + 1) & mask_) {
      const Slot& slot = slots_[at];
      if (slot.pair == pair) {
        result = slot.result;
        return slot.rank;
      }
      if (slot.pair == kEmptyPair) return kNoRank;
    }
  }
  static constexpr uint64_t kEmptyPair = ~uint64_t{0};

  void insert_merge(const BpeData::Merge& merge, uint32_t rank);
  void initial_ids(std::string_view word, std::vector<int32_t>& ids) const;
  void merge_short(const int32_t* initial, size_t count, std::vector<int32_t>& out) const;
  void merge_long(Scratch& scratch, std::vector<int32_t>& out) const;

  BpeData data_;
  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
  int shift_ = 0;
  std::unordered_map<std::string_view, int32_t> words_;  // for ignore_merges
};

// Encodes words through a cache and appends their ids to a vector in batches: flush() after the
// last word. Keeps references to its arguments. Not thread safe.
class WordEncoder {
 public:
  WordEncoder(const BpeModel& model, WordCache& cache, BpeModel::Scratch& scratch,
              std::vector<int32_t>& out)
      : model_(model), cache_(cache), scratch_(scratch), out_(out) {}
  WordEncoder(const WordEncoder&) = delete;

  // The end of the memory that the following words lie in: up to there bytes behind a word may be
  // read.
  void set_readable_end(const char* end) { readable_end_ = end; }

  void operator()(const char* begin, const char* end) {
    const auto length = static_cast<size_t>(end - begin);
    if (length > WordCache::kMaxShort) return encode_rare(begin, length, nullptr);
    const std::array<uint64_t, 2> key = load(begin, length);
    WordCache::Short* set = cache_.short_set(mix(key[0], key[1]));
    for (int way = 0; way < 2; ++way) {
      if (set[way].key[0] != key[0] || set[way].key[1] != key[1]) continue;
      if (used_ > kBatch - WordCache::kShortIds) flush();
      std::memcpy(batch_ + used_, set[way].ids, sizeof(set[way].ids));
      used_ += set[way].count;
      return;
    }
    encode_rare(begin, length, set);
  }

  void flush() {
    out_.insert(out_.end(), batch_, batch_ + used_);
    used_ = 0;
  }

 private:
  static constexpr size_t kBatch = 2048;

  static uint64_t mix(uint64_t a, uint64_t b) {
    const auto product =
        static_cast<unsigned __int128>(a ^ 0x2d358dccaa6c78a5u) * (b ^ 0x8bb84b93962eacc9u);
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }

  // The bytes (at most 15) padded with zeros; the last byte is their number.
  std::array<uint64_t, 2> load(const char* begin, size_t length) const {
    std::array<uint64_t, 2> key{};
    if (readable_end_ - begin >= 16) {
      std::memcpy(key.data(), begin, 16);
      key[0] &= length >= 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * length)) - 1;
      key[1] &= length <= 8 ? 0 : (uint64_t{1} << (8 * (length - 8))) - 1;
    } else {
      std::memcpy(key.data(), begin, length);
    }
    key[1] |= static_cast<uint64_t>(length) << 56;
    return key;
  }

  // A word that the cache of short words does not hold, or cannot hold (`short_set` is null).
  void encode_rare(const char* begin, size_t length, WordCache::Short* short_set);

  const BpeModel& model_;
  WordCache& cache_;
  BpeModel::Scratch& scratch_;
  std::vector<int32_t>& out_;
  const char* readable_end_ = nullptr;
  size_t used_ = 0;
  int32_t batch_[kBatch];
};

}  // namespace megatron
