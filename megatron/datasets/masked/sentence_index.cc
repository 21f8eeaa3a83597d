#include "megatron/datasets/masked/sentence_index.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// Lengths of rows: mostly the longest, now and then shorter.
class TargetLengths {
 public:
  TargetLengths(double short_probability, int64_t max_length, int64_t seed)
      : ratio_(short_probability > 0 ? static_cast<uint32_t>(std::lround(1.0 / short_probability))
                                     : 0),
        max_length_(max_length),
        random_(static_cast<uint32_t>(seed)) {}

  int64_t next() {
    if (ratio_ == 0) return max_length_;
    const auto number = static_cast<uint32_t>(random_());
    if (number % ratio_ != 0) return max_length_;
    return 2 + number % static_cast<uint32_t>(max_length_ - 1);
  }

 private:
  uint32_t ratio_;
  int64_t max_length_;
  std::mt19937 random_;
};

bool has_long_sentence(std::span<const int32_t> lengths) {
  // Four at a time: the sign of a difference shows it.
  int32_t signs[4] = {};
  size_t i = 0;
  for (; i + 4 <= lengths.size(); i += 4)
    for (size_t k = 0; k < 4; ++k) signs[k] |= kLongSentence - lengths[i + k];
  for (; i < lengths.size(); ++i) signs[0] |= kLongSentence - lengths[i];
  return (signs[0] | signs[1] | signs[2] | signs[3]) < 0;
}

// Cuts the sentences of a document: emit(begin, end, target) for each row. `next_target` is called
// before the first row and after every one. A single sentence is never left over.
template <class NextTarget, class Emit>
void cut_document(std::span<const int32_t> lengths, int64_t begin, int64_t end,
                  int64_t min_sentences, NextTarget next_target, Emit emit) {
  int64_t target = next_target();
  while (begin < end) {
    const int64_t last_cut = end - 2, first_cut = begin + min_sentences;
    int64_t tokens = 0, i = begin;
    for (; i + 4 <= last_cut; i += 4) {  // four at a time up to the target
      const int64_t four =
          tokens + int64_t{lengths[i]} + lengths[i + 1] + lengths[i + 2] + lengths[i + 3];
      if (four >= target) break;
      tokens = four;
    }
    while (i < last_cut && (tokens < target || i < first_cut)) tokens += lengths[i++];
    if (tokens < target || i < first_cut || i > last_cut) i = end;
    emit(begin, i, target);
    begin = i;
    target = next_target();
  }
}

// Swaps each row from the last on with one drawn before it. The draws do not depend on the rows, so
// those of a batch come first and their rows are prefetched.
template <int kWidth, class T>
void shuffle_rows(std::vector<T>& rows, int64_t seed) {
  constexpr int64_t kBatch = 128;
  std::mt19937_64 random(static_cast<uint64_t>(seed + 1));
  int64_t partners[kBatch];
  T* const data = rows.data();
  for (int64_t last = static_cast<int64_t>(rows.size()) / kWidth - 1; last > 0; last -= kBatch) {
    const int64_t count = std::min(kBatch, last);
    for (int64_t k = 0; k < count; ++k) {
      partners[k] = static_cast<int64_t>(random() % static_cast<uint64_t>(last - k + 1));
      __builtin_prefetch(data + kWidth * partners[k], 1);
    }
    for (int64_t k = 0; k < count; ++k) {
      if (partners[k] == last - k) continue;
      T* const row = data + kWidth * (last - k);
      std::swap_ranges(row, row + kWidth, data + kWidth * partners[k]);
    }
  }
}

template <class T>
SentenceCounts fill_sentence_rows(const SentenceIndexInputs& in, std::vector<T>& rows) {
  TargetLengths targets(in.short_probability, in.max_length, in.seed);
  SentenceCounts counts;
  const auto num_documents = static_cast<int64_t>(in.documents.size()) - 1;
  const int64_t max_epochs = in.num_samples ? in.max_epochs : std::min<int64_t>(in.max_epochs, 1);
  const auto next_target = [&] { return targets.next(); };
  // About an epoch of rows, so that they are rarely moved
  const auto split =
      in.lengths.subspan(in.documents.front(), in.documents.back() - in.documents.front());
  const int64_t tokens = std::accumulate(split.begin(), split.end(), int64_t{0});
  rows.reserve(static_cast<size_t>(3 * (num_documents + 2 * tokens / in.max_length)));
  const auto emit = [&](int64_t begin, int64_t end, int64_t target) {
    for (const int64_t value : {begin, end, target}) rows.push_back(static_cast<T>(value));
  };
  const auto full = [&] {
    return in.num_samples && static_cast<int64_t>(rows.size()) >= 3 * *in.num_samples;
  };
  for (int64_t epoch = 0; epoch < max_epochs && !full(); ++epoch) {
    counts = {.documents = num_documents};
    for (int64_t d = 0; d < num_documents; ++d) {
      const int64_t begin = in.documents[d], end = in.documents[d + 1];
      if (end - begin > 1 && has_long_sentence(in.lengths.subspan(begin, end - begin))) {
        ++counts.with_long_sentence;
      } else if (end == begin || end - begin < in.min_sentences) {
        ++counts.too_few_sentences;
      } else {
        cut_document(in.lengths, begin, end, in.min_sentences, next_target, emit);
      }
    }
    if (rows.empty()) break;
  }
  return counts;
}

template <class T>
void fill_block_rows(const SentenceIndexInputs& in, std::span<const int32_t> titles,
                     int64_t min_sentences, std::vector<T>& rows) {
  const auto num_documents = static_cast<int64_t>(in.documents.size()) - 1;
  const int64_t max_epochs = in.num_samples ? in.max_epochs : std::min<int64_t>(in.max_epochs, 1);
  for (int64_t epoch = 0; epoch < max_epochs; ++epoch) {
    if (in.num_samples && static_cast<int64_t>(rows.size()) >= 4 * *in.num_samples) break;
    int64_t block = 0;
    for (int64_t d = 0; d < num_documents; ++d) {
      const int64_t begin = in.documents[d], end = in.documents[d + 1];
      if (end == begin || end - begin < min_sentences ||
          has_long_sentence(in.lengths.subspan(begin, end - begin)))
        continue;
      cut_document(
          in.lengths, begin, end, min_sentences, [&] { return in.max_length - titles[d]; },
          [&](int64_t first, int64_t last, int64_t) {
            rows.insert(rows.end(), {static_cast<T>(first), static_cast<T>(last), static_cast<T>(d),
                                     static_cast<T>(block++)});
          });
    }
    if (rows.empty()) break;
  }
}

void check_sentence_inputs(const SentenceIndexInputs& in) {
  MEGATRON_CHECK(in.seed >= 1 && in.seed <= kMaxSentenceSeed, "--seed is ", in.seed,
                 ", the order of sentences needs 1 to ", kMaxSentenceSeed);
  MEGATRON_ASSERT(in.max_length >= 2 && in.max_length <= std::numeric_limits<int32_t>::max());
  MEGATRON_ASSERT(in.min_sentences >= 1 && !in.documents.empty());
}

bool needs_wide_rows(const SentenceIndexInputs& in) {
  return in.lengths.size() > std::numeric_limits<uint32_t>::max();
}

}  // namespace

SentenceIndex build_sentence_index(const SentenceIndexInputs& in) {
  check_sentence_inputs(in);
  SentenceIndex out;
  out.rows.is_wide = needs_wide_rows(in);
  if (out.rows.is_wide) {
    out.counts = fill_sentence_rows(in, out.rows.wide);
    shuffle_rows<3>(out.rows.wide, in.seed);
  } else {
    out.counts = fill_sentence_rows(in, out.rows.narrow);
    shuffle_rows<3>(out.rows.narrow, in.seed);
  }
  return out;
}

SentenceRowArray build_blocks_index(const SentenceIndexInputs& in, std::span<const int32_t> titles,
                                    bool one_sentence_blocks) {
  check_sentence_inputs(in);
  MEGATRON_ASSERT(titles.size() + 1 == in.documents.size());
  const int64_t min_sentences = one_sentence_blocks ? 1 : 2;
  SentenceRowArray out;
  out.width = 4;
  out.is_wide = needs_wide_rows(in);
  if (out.is_wide) {
    fill_block_rows(in, titles, min_sentences, out.wide);
    shuffle_rows<4>(out.wide, in.seed);
  } else {
    fill_block_rows(in, titles, min_sentences, out.narrow);
    shuffle_rows<4>(out.narrow, in.seed);
  }
  return out;
}

}  // namespace megatron
