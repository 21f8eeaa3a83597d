#include "megatron/datasets/masked/sentence_source.h"

#include <algorithm>
#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/index_cache.h"

namespace megatron {
namespace {

class FileSentences final : public SentenceSource {
 public:
  FileSentences(std::shared_ptr<const IndexedDataset> data, std::pair<double, double> bounds,
                Split split, std::optional<int64_t> num_samples,
                const SentenceSourceOptions& options);

  int64_t size() const override { return size_; }
  void read(int64_t index, SentenceRun& out) const override;
  std::string name() const override { return data_->prefix(); }
  void describe(JsonWriter& json) const override;

 private:
  struct Row {
    int64_t first, end, target;
  };
  SentenceIndexInputs index_inputs() const;
  SentenceRowArray build() const;
  void load(const std::string& description);
  [[noreturn]] void refuse_empty(const SentenceCounts& counts) const;
  Row row(int64_t index) const;

  std::shared_ptr<const IndexedDataset> data_;
  int64_t first_document_, last_document_;
  Split split_;
  std::optional<int64_t> num_samples_;
  SentenceSourceOptions options_;
  SentenceRowArray built_;        // when the cache is not used
  std::vector<NpyArray> cached_;  // the sentence index
  const uint32_t* narrow_ = nullptr;
  const uint64_t* wide_ = nullptr;
  int64_t size_ = 0;
};

FileSentences::FileSentences(std::shared_ptr<const IndexedDataset> data,
                             std::pair<double, double> bounds, Split split,
                             std::optional<int64_t> num_samples,
                             const SentenceSourceOptions& options)
    : data_(std::move(data)), split_(split), num_samples_(num_samples), options_(options) {
  std::tie(first_document_, last_document_) = split_range(bounds, data_->num_documents());
  JsonWriter json;
  json.begin_object().member("class", "SentenceIndex");
  describe(json);
  json.end_object();
  load(json.text());
}

SentenceIndexInputs FileSentences::index_inputs() const {
  SentenceIndexInputs in;
  in.documents =
      data_->document_indices().subspan(static_cast<size_t>(first_document_),
                                        static_cast<size_t>(last_document_ - first_document_) + 1);
  in.lengths = data_->sequence_lengths();
  in.num_samples = num_samples_;
  in.max_length = options_.max_length;
  in.short_probability = options_.short_probability;
  in.seed = options_.seed;
  in.min_sentences = options_.min_sentences;
  return in;
}

void FileSentences::refuse_empty(const SentenceCounts& counts) const {
  const bool is_sentences = data_->num_sequences() > data_->num_documents();
  const int64_t long_ones = counts.with_long_sentence, few = counts.too_few_sentences;
  std::string why;
  if (long_ones > 0)
    why += cat(": ", format_count(long_ones), " have a sentence of more than ", kLongSentence,
               " tokens");
  if (few > 0)
    why += cat(long_ones > 0 ? ", " : ": ", format_count(few), " have fewer than ",
               options_.min_sentences, options_.min_sentences == 1 ? " sentence" : " sentences");
  std::string hint = "give more data or a larger share of --split";
  if (options_.min_sentences > 1 && !is_sentences)
    hint =
        "the loss of the order of sentences needs a data set with one sequence for each "
        "sentence: write it with preprocess-data --split-sentences, or give "
        "--bert-no-binary-head";
  throw_error(cat(data_->prefix(), ": the ", to_string(split_), " split gives no sample from its ",
                  format_count(counts.documents), " documents", why, "\nhint: ", hint));
}

SentenceRowArray FileSentences::build() const {
  SentenceIndex index = build_sentence_index(index_inputs());
  if (index.rows.size() == 0) refuse_empty(index.counts);
  return std::move(index.rows);
}

void FileSentences::load(const std::string& description) {
  static const std::string kNames[] = {"sentence_index"};
  const auto make = [&](const std::function<void(std::span<const CacheArray>)>& store) {
    const SentenceRowArray rows = build();
    const CacheArray array = {
        kNames[0],
        rows.is_wide ? "<u8" : "<u4",
        {rows.size(), 3},
        rows.is_wide ? std::as_bytes(std::span(rows.wide)) : std::as_bytes(std::span(rows.narrow))};
    store({&array, 1});
  };
  const std::filesystem::path folder =
      index_folders(data_->prefix(), options_.cache_path, "SentenceIndex_indices").front();
  IndexCache cache(folder, "SentenceIndex-" + to_string(split_), description);
  if (cache.get(kNames, make, cached_)) {
    const NpyArray& array = cached_[0];
    MEGATRON_CHECK(array.shape().size() == 2 && array.shape()[1] == 3, data_->prefix(),
                   ": the cached sentence index has rows of another width than 3",
                   "\nhint: remove the cache folder");
    if (array.dtype() == "<u8")
      wide_ = array.as<uint64_t>("<u8").data();
    else
      narrow_ = array.as<uint32_t>("<u4").data();
    size_ = array.shape()[0];
    return;
  }
  built_ = build();
  (built_.is_wide ? static_cast<void>(wide_ = built_.wide.data())
                  : static_cast<void>(narrow_ = built_.narrow.data()));
  size_ = built_.size();
}

FileSentences::Row FileSentences::row(int64_t index) const {
  MEGATRON_CHECK(index >= 0 && index < size_, data_->prefix(), ": there is no sample ", index,
                 " of ", size_);
  const auto at = [&](int64_t k) {
    return static_cast<int64_t>(wide_ != nullptr ? wide_[3 * index + k] : narrow_[3 * index + k]);
  };
  const Row row{at(0), at(1), at(2)};
  const auto documents = data_->document_indices();
  MEGATRON_CHECK(row.first >= documents[first_document_] && row.first < row.end &&
                     row.end <= documents[last_document_] && row.target >= 1 &&
                     row.target <= options_.max_length,
                 data_->prefix(), ": row ", index, " of the cached sentence index is ", row.first,
                 ", ", row.end, ", ", row.target, "\nhint: remove the cache folder");
  return row;
}

void FileSentences::read(int64_t index, SentenceRun& out) const {
  const Row r = row(index);
  const auto lengths = data_->sequence_lengths();
  out.target = r.target;
  out.ends.clear();
  size_t total = 0;
  for (int64_t i = r.first; i < r.end; ++i)
    out.ends.push_back(total += static_cast<size_t>(lengths[i]));
  out.tokens.resize(total);
  size_t begin = 0;
  for (int64_t i = r.first; i < r.end; ++i) {
    const auto length = static_cast<size_t>(lengths[i]);
    const auto sentence = std::span(out.tokens).subspan(begin, length);
    data_->read(i, 0, sentence);
    check_vocabulary(*data_, i, 0, sentence, options_.vocab_size);
    begin += length;
  }
}

void FileSentences::describe(JsonWriter& json) const {
  json.member("file", std::filesystem::path(data_->prefix()).filename().string());
  json.member("index_hash", data_->index_hash()).member("num_tokens", data_->num_tokens());
  json.member("split", to_string(split_))
      .member("first_document", first_document_)
      .member("last_document", last_document_);
  json.member("max_length", options_.max_length)
      .member("min_sentences", options_.min_sentences)
      .member("short_probability", options_.short_probability);
  if (num_samples_) json.member("num_samples", *num_samples_);
  json.member("random_seed", options_.seed);
}

// SplitMix64: a hash of a counter.
class CounterHash {
 public:
  explicit CounterHash(uint64_t seed) : state_(seed) { next(); }
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
  }
  int64_t below(int64_t count) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(count));
  }

 private:
  uint64_t state_;
};

class MockSentences final : public SentenceSource {
 public:
  MockSentences(Split split, int64_t num_samples, const MockSentenceIds& ids,
                const SentenceSourceOptions& options)
      : split_(split), num_samples_(num_samples), ids_(ids), options_(options) {
    MEGATRON_CHECK(ids.first + 1 < ids.last, "--mock-data needs more ids than ", ids.last,
                   " for sentences and special tokens\nhint: give a larger --vocab-size");
  }
  int64_t size() const override { return num_samples_; }
  void read(int64_t index, SentenceRun& out) const override;
  std::string name() const override { return "mock data"; }
  void describe(JsonWriter& json) const override {
    json.member("mock", true).member("split", to_string(split_));
    json.member("num_samples", num_samples_).member("first_id", ids_.first);
    json.member("last_id", ids_.last).member("hole", ids_.hole);
    json.member("max_length", options_.max_length)
        .member("min_sentences", options_.min_sentences)
        .member("random_seed", options_.seed);
    if (ids_.most > 0) json.member("least", ids_.least).member("most", ids_.most);
  }

 private:
  // A run of `length` tokens in sentences of about a third of it.
  void fill(int64_t length, CounterHash& hash, SentenceRun& out) const;

  Split split_;
  int64_t num_samples_;
  MockSentenceIds ids_;
  SentenceSourceOptions options_;
};

void MockSentences::fill(int64_t length, CounterHash& hash, SentenceRun& out) const {
  out.tokens.clear();
  out.ends.clear();
  int64_t id = hash.below(ids_.last - ids_.first);
  for (int64_t i = 0; i < length; ++i) {
    out.tokens.push_back(ids_.first + id);
    id = (id + 1) % (ids_.last - ids_.first);
  }
  const int64_t step = std::max<int64_t>(1, length / std::max<int64_t>(3, options_.min_sentences));
  for (int64_t end = step; end < length; end += step) out.ends.push_back(static_cast<size_t>(end));
  out.ends.push_back(static_cast<size_t>(length));
}

// Of eight runs about two are full, one is more than full, one has a short target, and one has a
// single sentence, where that is legal; a quarter of them has holes.
void MockSentences::read(int64_t index, SentenceRun& out) const {
  MEGATRON_CHECK(index >= 0 && index < num_samples_, "there is no sample ", index, " of ",
                 num_samples_);
  CounterHash hash(static_cast<uint64_t>((options_.seed * kNumSplits + static_cast<int>(split_)) *
                                         (int64_t{1} << 40)) +
                   static_cast<uint64_t>(index));
  const int64_t longest = options_.max_length;
  if (ids_.most > 0) {
    out.target = longest;
    const int64_t length = ids_.least + hash.below(ids_.most - ids_.least + 1);
    return fill(std::max(options_.min_sentences, std::min(length, longest)), hash, out);
  }
  const int64_t kind = hash.below(8);
  out.target = kind == 0 ? 2 + hash.below(std::max<int64_t>(1, longest - 1)) : longest;
  out.target = std::min(out.target, longest);
  const int64_t wanted = kind <= 2   ? out.target
                         : kind == 3 ? out.target + 1 + hash.below(longest)
                                     : 1 + hash.below(out.target);
  const int64_t most = std::max<int64_t>(2, longest / 3);
  const bool holes = ids_.hole >= 0 && hash.below(4) == 0;
  out.tokens.clear();
  out.ends.clear();
  while (static_cast<int64_t>(out.tokens.size()) < wanted ||
         static_cast<int64_t>(out.ends.size()) < options_.min_sentences) {
    const int64_t length = kind == 7 && options_.min_sentences == 1 ? wanted : 1 + hash.below(most);
    int64_t id = hash.below(ids_.last - ids_.first);
    for (int64_t i = 0; i < length; ++i) {
      const bool hole = holes && hash.below(6) == 0;
      out.tokens.push_back(hole ? ids_.hole : ids_.first + id);
      id = (id + 1) % (ids_.last - ids_.first);
    }
    out.ends.push_back(out.tokens.size());
  }
}

}  // namespace

std::unique_ptr<const SentenceSource> sentences_of_file(std::shared_ptr<const IndexedDataset> data,
                                                        std::pair<double, double> bounds,
                                                        Split split,
                                                        std::optional<int64_t> num_samples,
                                                        const SentenceSourceOptions& options) {
  return std::make_unique<FileSentences>(std::move(data), bounds, split, num_samples, options);
}

std::unique_ptr<const SentenceSource> mock_sentences(Split split, int64_t num_samples,
                                                     const MockSentenceIds& ids,
                                                     const SentenceSourceOptions& options) {
  return std::make_unique<MockSentences>(split, num_samples, ids, options);
}

}  // namespace megatron
