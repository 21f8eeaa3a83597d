#include "megatron/datasets/gpt/gpt_indices.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/detail/numpy_random.h"

namespace megatron {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// Sequences [first, last), repeated `epochs` times.
template <class T>
void fill_epochs(std::span<T> out, int64_t first, int64_t last) {
  for (size_t i = 0, id = first; i < out.size(); ++i) {
    out[i] = static_cast<T>(id);
    if (static_cast<int64_t>(++id) == last) id = first;
  }
}

template <class T>
void fill_document_index(std::span<T> out, int64_t first, int64_t last, bool separate_final_epoch,
                         NumpyRandom& random) {
  fill_epochs(out, first, last);
  if (!separate_final_epoch) return random.shuffle(out);
  const size_t head = out.size() - (last - first);
  random.shuffle(out.first(head));
  random.shuffle(out.subspan(head));
}

template <class T>
void fill_shuffle_index(std::span<T> out, int64_t head, NumpyRandom& random) {
  std::iota(out.begin(), out.end(), T{0});
  random.shuffle(out.first(head));
  random.shuffle(out.subspan(head));
}

// Ends of the documents in the stream of tokens: ends[i] = tokens of documents 0..i.
std::vector<int64_t> document_ends(const IndexArray& documents, std::span<const int32_t> lengths) {
  std::vector<int64_t> ends(documents.size());
  int64_t total = 0;
  for (int64_t i = 0; i < documents.size(); ++i) ends[i] = total += lengths[documents[i]];
  return ends;
}

// Rows [begin, end), begin >= 1. Row k points after the last token of sample k - 1 (extra 0), or to
// it (extra 1): the document that contains token t = k * sequence_length + extra - 1, and the
// offset of t in it plus 1 - extra.
template <class T>
void fill_rows(std::span<T> rows, int64_t begin, int64_t end, std::span<const int64_t> ends,
               int64_t last_length, int64_t sequence_length, int64_t extra) {
  const auto token_of = [&](int64_t k) { return k * sequence_length + extra - 1; };
  int64_t document = std::upper_bound(ends.begin(), ends.end(), token_of(begin)) - ends.begin();
  const int64_t num_documents = ends.size();
  for (int64_t k = begin; k < end; ++k) {
    const int64_t token = token_of(k);
    while (document < num_documents && ends[document] <= token) ++document;
    if (document == num_documents) {  // end of the documents: a partial last sample
      rows[2 * k] = static_cast<T>(num_documents - 1);
      rows[2 * k + 1] = static_cast<T>(last_length - extra);
    } else {
      const int64_t start = document == 0 ? 0 : ends[document - 1];
      rows[2 * k] = static_cast<T>(document);
      rows[2 * k + 1] = static_cast<T>(token - start + 1 - extra);
    }
  }
}

}  // namespace

void IndexArray::resize(int64_t count, bool use_wide) {
  is_wide = use_wide;
  if (is_wide) {
    wide.resize(count);
  } else {
    narrow.resize(count);
  }
}

int64_t num_epochs_for(int64_t tokens_per_epoch, int64_t sequence_length, int64_t extra,
                       std::optional<int64_t> num_samples) {
  MEGATRON_ASSERT(tokens_per_epoch > 0);
  if (!num_samples) return 1;
  MEGATRON_CHECK(
      *num_samples <= (std::numeric_limits<int64_t>::max() / 2 - extra) / sequence_length,
      *num_samples, " samples of ", sequence_length, " tokens are more tokens than can be counted");
  const int64_t wanted = *num_samples * sequence_length + extra;
  return std::max<int64_t>(1, (wanted + tokens_per_epoch - 1) / tokens_per_epoch);
}

IndexArray build_sample_index(const IndexArray& documents, std::span<const int32_t> lengths,
                              int64_t sequence_length, int64_t extra, bool drop_last, int threads) {
  const std::vector<int64_t> ends = document_ends(documents, lengths);
  const int64_t available = (ends.empty() ? 0 : ends.back()) - extra;
  // Megatron-LM computes the ceiling in single precision.
  const int64_t num_samples =
      drop_last ? available / sequence_length
                : static_cast<int64_t>(std::ceil(static_cast<float>(available) /
                                                 static_cast<float>(sequence_length)));
  const int64_t max_length =
      lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  const int64_t last_length = documents.size() ? lengths[documents[documents.size() - 1]] : 0;

  IndexArray rows;
  rows.resize(2 * (num_samples + 1), std::max<int64_t>(documents.size(), max_length) > kMaxInt32);
  parallel_for(
      num_samples, 1 << 16,
      [&](int64_t begin, int64_t end) {  // row 0 stays (0, 0)
        if (rows.is_wide) {
          fill_rows(std::span(rows.wide), begin + 1, end + 1, ends, last_length, sequence_length,
                    extra);
        } else {
          fill_rows(std::span(rows.narrow), begin + 1, end + 1, ends, last_length, sequence_length,
                    extra);
        }
      },
      threads);
  return rows;
}

GPTIndices build_gpt_indices(const GPTIndexInputs& in) {
  GPTIndices out;
  const int64_t num_documents = in.last - in.first;
  const auto split_lengths = in.lengths.subspan(in.first, num_documents);
  const int64_t tokens = std::accumulate(split_lengths.begin(), split_lengths.end(), int64_t{0});
  out.num_epochs = num_epochs_for(tokens, in.sequence_length, in.extra, in.num_samples);

  // The last epoch is shuffled separately if less than four fifths of it are used.
  const int64_t before_final = ((out.num_epochs - 1) * tokens - in.extra) / in.sequence_length;
  if (out.num_epochs > 1) {
    const int64_t from_final = *in.num_samples - before_final;
    const int64_t per_epoch = (tokens - in.extra) / in.sequence_length;
    out.separate_final_epoch =
        from_final < static_cast<int64_t>(0.80 * static_cast<double>(per_epoch));
  }

  NumpyRandom random(in.seed);
  out.document_index.resize(num_documents * out.num_epochs, in.last > kMaxInt32);
  if (out.document_index.is_wide) {
    fill_document_index(std::span(out.document_index.wide), in.first, in.last,
                        out.separate_final_epoch, random);
  } else {
    fill_document_index(std::span(out.document_index.narrow), in.first, in.last,
                        out.separate_final_epoch, random);
  }
  out.sample_index = build_sample_index(out.document_index, in.lengths, in.sequence_length,
                                        in.extra, in.drop_last, in.threads);

  const int64_t num_rows = out.sample_index.size() / 2 - 1;
  const int64_t head = out.separate_final_epoch ? before_final : num_rows;
  if (num_rows >= int64_t{std::numeric_limits<uint32_t>::max()} - 1) {
    out.shuffle_wide.resize(num_rows);
    fill_shuffle_index(std::span(out.shuffle_wide), head, random);
  } else {
    out.shuffle_narrow.resize(num_rows);
    fill_shuffle_index(std::span(out.shuffle_narrow), head, random);
  }
  return out;
}

}  // namespace megatron
