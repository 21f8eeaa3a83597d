// Encoding of words (pieces of pre-tokenized text) through a cache of bounded size.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// Scratch memory of models for encoding one word, reused between words. Belongs to one thread.
struct ModelScratch {
  std::vector<int32_t> ids, next, previous, result;
  std::vector<uint32_t> rank;
  std::vector<uint64_t> heap;
  std::vector<double> score;
  std::vector<double> second;
  std::string text;
};

// A model of words: BPE, Unigram, WordPiece or WordLevel. Thread safe except for the scratch
// memory.
class WordModel {
 public:
  virtual ~WordModel() = default;
  // Appends the ids of one word, which is not empty and well-formed UTF-8, without a cache.
  // Throws Error for words that the vocabulary cannot express.
  virtual void encode_word(std::string_view word, ModelScratch& scratch,
                           std::vector<int32_t>& out) const = 0;
};

// A placeholder if words are not encoded separately.
class NoWordModel : public WordModel {
 public:
  void encode_word(std::string_view, ModelScratch&, std::vector<int32_t>&) const override {}
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

  // The two entries that may hold a key.
  Short* short_set(uint64_t hash) { return &short_[(hash >> kShortShift) * 2]; }
  Long* long_set(uint64_t hash) { return &long_[(hash >> kLongShift) * 2]; }

 private:
  static constexpr int kShortBits = 15, kLongBits = 13;
  static constexpr int kShortShift = 64 - kShortBits, kLongShift = 64 - kLongBits;
  std::unique_ptr<Short[]> short_;
  std::unique_ptr<Long[]> long_;
};

// Encodes words through a cache and appends their ids to a vector in batches: flush() after the
// last word. Keeps references to its arguments. Not thread safe.
class WordEncoder {
 public:
  WordEncoder(const WordModel& model, WordCache& cache, ModelScratch& scratch,
              std::vector<int32_t>& out)
      : model_(model), cache_(cache), scratch_(scratch), out_(out) {}
  WordEncoder(const WordEncoder&) = delete;

  // Sets the end of readable memory: up to there bytes after a word may be read.
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

  // The bytes (at most 15) padded with zeros; the last byte is their count.
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

  // Encodes a word that is not in the cache of short words, or too long for it (`short_set` is
  // null).
  void encode_rare(const char* begin, size_t length, WordCache::Short* short_set);

  const WordModel& model_;
  WordCache& cache_;
  ModelScratch& scratch_;
  std::vector<int32_t>& out_;
  const char* readable_end_ = nullptr;
  size_t used_ = 0;
  int32_t batch_[kBatch];
};

}  // namespace megatron
