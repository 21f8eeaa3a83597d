#include "megatron/tokenizers/detail/unigram_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr double kResetSum = 100000;  // SentencePiece's kScoreResetThreshold

// Note [Margins]
// A word's segmentation, computed from a running sum of 0, is what the reference computes after any
// text if at each of its splits the best sum beats the second best by more than rounding can change
// both. A sum of n terms below m in magnitude has an error of at most n * m * epsilon / 2. The
// cache stores the smallest lead of a segmentation as a power of two, next to the number of ids;
// where that is too small (segmentations of equal score, such as "aa a" and "a aa", have no lead)
// the word is segmented again from the exact running sum.
constexpr int kMarginBias = 64;
constexpr uint32_t kNotCached = 255;  // instead of the count: segment the word every time

uint32_t pack(size_t count, double margin) {
  // a word with a single segmentation has no second best
  const double finite = std::min(margin, 1e18);
  const int exponent = finite > 0 ? std::clamp(std::ilogb(finite) + kMarginBias, 0, 127) : 0;
  return static_cast<uint32_t>(count) | static_cast<uint32_t>(exponent) << 8;
}

uint64_t mix(uint64_t a, uint64_t b) {
  const auto product =
      static_cast<unsigned __int128>(a ^ 0x2d358dccaa6c78a5u) * (b ^ 0x8bb84b93962eacc9u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

UnigramModel::UnigramModel(UnigramData data) : data_(std::move(data)) {
  std::vector<std::pair<std::string_view, int32_t>> entries;
  bool knows_mark = false;
  for (size_t id = 0; id < data_.tokens.size(); ++id) {
    if (data_.tokens[id].empty()) continue;
    entries.emplace_back(data_.tokens[id], static_cast<int32_t>(id));
    cutter_.add_token(data_.tokens[id]);
    knows_mark |= data_.tokens[id] == kMetaspace;
  }
  trie_ = DoubleArray(std::move(entries));
  if (knows_mark) cutter_.enable();  // else a run of unknown characters could span a split
}

void UnigramModel::encode(std::string_view text, WordCache& cache, ModelScratch& scratch,
                          std::vector<int32_t>& out) const {
  double sum = 0;
  const double cached_sums = kResetSum - 2000 - 40 * std::abs(data_.unknown_score);
  const double epsilon = data_.sentencepiece ? 1.2e-7 : 2.3e-16;
  cutter_.split(text, [&](const char* begin, const char* end) {
    const auto length = static_cast<size_t>(end - begin);
    if (length > WordCache::kMaxLong || std::abs(sum) > cached_sums) {
      divide({begin, length}, sum, scratch, out);
      return;
    }
    uint64_t key[4] = {};
    std::memcpy(key, begin, length);
    const bool is_short = length <= WordCache::kMaxShort;
    key[is_short ? 1 : 3] |= static_cast<uint64_t>(length) << 56;
    WordCache::Short* short_set = nullptr;
    WordCache::Long* long_set = nullptr;
    const int32_t* ids = nullptr;
    uint32_t packed = 0;
    if (is_short) {
      short_set = cache.short_set(mix(key[0], key[1]));
      for (int way = 0; way < 2 && ids == nullptr; ++way) {
        if (short_set[way].key[0] != key[0] || short_set[way].key[1] != key[1]) continue;
        ids = short_set[way].ids;
        packed = short_set[way].count;
      }
    } else {
      long_set = cache.long_set(mix(mix(key[0], key[1]) ^ key[2], key[3]));
      for (int way = 0; way < 2 && ids == nullptr; ++way) {
        if (std::memcmp(long_set[way].key, key, sizeof(key)) != 0) continue;
        ids = long_set[way].ids;
        packed = long_set[way].count;
      }
    }
    if (ids != nullptr && (packed & 255) == kNotCached) {
      divide({begin, length}, sum, scratch, out);
      return;
    }
    if (ids != nullptr) {
      const uint32_t count = packed & 255;
      double after = sum;
      for (uint32_t i = 0; i < count; ++i) after = add(after, data_.scores[ids[i]]);
      const double largest = std::max(std::abs(sum), std::abs(after)) + 64;
      const double moved = static_cast<double>(length) * largest * epsilon + 1e-9;
      if (sum == 0 || std::ldexp(1.0, static_cast<int>(packed >> 8) - kMarginBias) > moved) {
        out.insert(out.end(), ids, ids + count);
        sum = after;
        return;
      }
      divide({begin, length}, sum, scratch, out);
      return;
    }
    // The cache holds results for a sum of 0.
    const size_t before = out.size();
    double from_zero = 0;
    const double margin = divide({begin, length}, from_zero, scratch, out);
    const size_t count = out.size() - before;
    const int32_t* found = out.data() + before;
    const bool kept =
        margin >= 0 && count <= (is_short ? WordCache::kShortIds : WordCache::kLongIds);
    const auto store = [&](auto* set) {
      set[1] = set[0];
      std::memcpy(set[0].key, key, sizeof(set[0].key));
      if (kept) std::copy(found, found + count, set[0].ids);
      set[0].count = kept ? pack(count, margin) : kNotCached;
    };
    if (is_short) {
      store(short_set);
    } else {
      store(long_set);
    }
    if (sum == 0) {
      sum = from_zero;
    } else {
      out.resize(before);
      divide({begin, length}, sum, scratch, out);
    }
  });
}

double UnigramModel::divide(std::string_view word, double& sum, ModelScratch& s,
                            std::vector<int32_t>& out) const {
  const size_t size = word.size();
  MEGATRON_CHECK(size < (size_t{1} << 31), "a word of ", size, " bytes is too long to encode");
  s.score.assign(size + 1, 0);
  s.second.assign(size + 1, -HUGE_VAL);
  s.previous.assign(size + 1, -1);
  s.ids.resize(size + 1);
  s.score[0] = sum;
  bool reset = false;
  size_t frontier = 0;
  const auto offer = [&](size_t begin, size_t end, double sum_here, double score, int32_t id) {
    const double candidate = add(sum_here, score);
    frontier = std::max(frontier, end);
    if (s.previous[end] < 0 || candidate > s.score[end]) {
      if (s.previous[end] >= 0) s.second[end] = s.score[end];
      s.score[end] = candidate;
      s.previous[end] = static_cast<int32_t>(begin);
      s.ids[end] = id;
    } else if (candidate > s.second[end]) {
      s.second[end] = candidate;
    }
  };
  size_t length;
  for (size_t begin = 0; begin < size; begin += length) {
    decode_utf8(word.data() + begin, length);
    double sum_here = s.score[begin];
    if (data_.sentencepiece && std::abs(sum_here) > kResetSum) {
      for (size_t i = begin; i <= frontier; ++i) {
        if (i == begin || s.previous[i] >= 0) s.score[i] = add(s.score[i], -sum_here);
      }
      reset = true;
      sum_here = 0;
    }
    bool single = false;
    trie_.for_each_prefix(word.substr(begin), [&](size_t matched, int32_t id) {
      offer(begin, begin + matched, sum_here, data_.scores[id], id);
      single |= matched == length;
    });
    if (single) continue;
    MEGATRON_CHECK(data_.unknown >= 0, "the tokenizer's vocabulary has no token for \"",
                   word.substr(begin, length), "\" and no unknown token");
    offer(begin, begin + length, sum_here, data_.unknown_score, data_.unknown);
  }
  sum = s.score[size];
  double margin = HUGE_VAL;
  bool unknown = false;
  s.next.clear();
  for (size_t end = size; end > 0; end = static_cast<size_t>(s.previous[end])) {
    s.next.push_back(static_cast<int32_t>(end));
    margin = std::min(margin, s.score[end] - s.second[end]);
    unknown |= s.ids[end] == data_.unknown;
  }
  size_t run = 0, begin = 0;  // length of the run of unknown characters from `begin`
  for (auto end = s.next.rbegin(); end != s.next.rend(); ++end) {
    const auto position = static_cast<size_t>(*end);
    if (s.ids[position] == data_.unknown) {
      run = position - begin;
      continue;
    }
    if (run > 0) append_unknown(word.substr(begin, run), out);
    run = 0;
    begin = position;
    out.push_back(s.ids[position]);
  }
  if (run > 0) append_unknown(word.substr(begin, run), out);
  return reset || unknown ? -1 : margin;
}

void UnigramModel::append_unknown(std::string_view text, std::vector<int32_t>& out) const {
  size_t length;
  if (const int32_t id = trie_.find_longest(text, length); id >= 0 && length == text.size()) {
    out.push_back(id);  // the text is the unknown token's spelling
    return;
  }
  const bool bytes = data_.byte_fallback && std::all_of(text.begin(), text.end(), [&](char c) {
                       return data_.byte_ids[static_cast<unsigned char>(c)] >= 0;
                     });
  if (!bytes) {
    out.push_back(data_.unknown);
    return;
  }
  for (const char c : text) out.push_back(data_.byte_ids[static_cast<unsigned char>(c)]);
}

}  // namespace megatron
