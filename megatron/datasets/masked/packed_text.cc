#include "megatron/datasets/masked/packed_text.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/gpt/sample_order.h"

namespace megatron {
namespace {

void describe_packing(const PackedTextOptions& options, JsonWriter& json) {
  json.member("sequence_length", options.sequence_length)
      .member("prefix", std::span(options.prefix))
      .member("suffix", std::span(options.suffix));
  json.member("random_seed", options.seed);
}

int64_t num_specials(const PackedTextOptions& options) {
  return std::ssize(options.prefix) + std::ssize(options.suffix);
}

// Copies what stands from `skip` on of things in a row until `out` is full.
class PartReader {
 public:
  PartReader(int64_t skip, std::span<int64_t> out) : skip_(skip), left_(out) {}
  // The next thing, of this length; read(from, into) reads a part of it.
  template <class Read>
  void take(int64_t length, const Read& read) {
    const int64_t from = std::min(skip_, length),
                  count = std::min(length - from, std::ssize(left_));
    skip_ -= from;
    if (count == 0) return;
    read(from, left_.first(static_cast<size_t>(count)));
    left_ = left_.subspan(static_cast<size_t>(count));
  }
  void take(std::span<const int64_t> ids) {
    take(std::ssize(ids), [&](int64_t from, std::span<int64_t> into) {
      std::copy_n(ids.begin() + from, into.size(), into.begin());
    });
  }
  bool is_full() const { return left_.empty(); }

 private:
  int64_t skip_;
  std::span<int64_t> left_;
};

class FilePackedText final : public PackedText {
 public:
  FilePackedText(std::shared_ptr<const IndexedDataset> data, std::pair<double, double> bounds,
                 Split split, std::optional<int64_t> num_samples, const PackedTextOptions& options);

  int64_t size() const override { return order_->size(); }
  void read(int64_t index, std::span<int64_t> tokens, std::vector<int32_t>& starts) const override;
  void describe(JsonWriter& json) const override;

 private:
  void measure_documents();
  void check_request() const;
  void read_part(int64_t document, int64_t offset, std::span<int64_t> out) const;

  const std::shared_ptr<const IndexedDataset> data_;
  int64_t first_, last_;  // documents
  const Split split_;
  const std::optional<int64_t> num_samples_;
  const PackedTextOptions options_;
  std::vector<int32_t> lengths_;  // of all documents with what stands around them
  std::unique_ptr<const SampleOrder> order_;
};

FilePackedText::FilePackedText(std::shared_ptr<const IndexedDataset> data,
                               std::pair<double, double> bounds, Split split,
                               std::optional<int64_t> num_samples, const PackedTextOptions& options)
    : data_(std::move(data)), split_(split), num_samples_(num_samples), options_(options) {
  std::tie(first_, last_) = split_range(bounds, data_->num_documents());
  measure_documents();
  check_request();
  JsonWriter json;
  json.begin_object().member("class", "PackedText");
  describe(json);
  json.end_object();
  GPTIndexInputs inputs;
  inputs.first = first_;
  inputs.last = last_;
  inputs.lengths = lengths_;
  inputs.sequence_length = options.sequence_length;
  inputs.extra = 0;
  inputs.num_samples = num_samples;
  inputs.seed = static_cast<uint32_t>(options.seed);
  inputs.threads = options.threads;
  SampleOrderOptions order;
  order.data = data_->prefix();
  order.folder = index_folders(data_->prefix(), options.cache_path, "PackedText_indices").front();
  order.name = "PackedText-" + to_string(split);
  order.description = json.text();
  order_ = std::make_unique<const SampleOrder>(inputs, order);
}

void FilePackedText::measure_documents() {
  const auto documents = data_->document_indices();
  lengths_.resize(static_cast<size_t>(data_->num_documents()));
  for (int64_t d = first_; d < last_; ++d) {
    const auto at = static_cast<size_t>(d);
    const int64_t tokens = data_->num_tokens(documents[at], documents[at + 1]),
                  length = tokens == 0 ? 0 : tokens + num_specials(options_);
    MEGATRON_CHECK(length <= std::numeric_limits<int32_t>::max(), data_->prefix(), ": document ", d,
                   " has ", tokens, " tokens, packing needs fewer than 2^31");
    lengths_[at] = static_cast<int32_t>(length);
  }
}

void FilePackedText::check_request() const {
  MEGATRON_CHECK(options_.seed >= 0 && options_.seed <= 0xffffffffLL, "--seed is ", options_.seed,
                 ", the order of samples needs 0 to 4294967295");
  int64_t tokens = 0;
  for (int64_t d = first_; d < last_; ++d) tokens += lengths_[static_cast<size_t>(d)];
  MEGATRON_CHECK(tokens >= options_.sequence_length, data_->prefix(), ": the ", to_string(split_),
                 " split holds ", format_count(tokens), " tokens in ", format_count(last_ - first_),
                 " documents, with those around each of them, one packed sample needs ",
                 options_.sequence_length,
                 "\nhint: give more data, a larger share of --split, or a smaller --seq-length");
}

void FilePackedText::read_part(int64_t document, int64_t offset, std::span<int64_t> out) const {
  const auto documents = data_->document_indices();
  const auto at = static_cast<size_t>(document);
  PartReader part(offset, out);
  part.take(options_.prefix);
  for (int64_t i = documents[at]; i < documents[at + 1] && !part.is_full(); ++i)
    part.take(data_->sequence_lengths()[static_cast<size_t>(i)],
              [&](int64_t from, std::span<int64_t> into) {
                data_->read(i, from, into);
                check_vocabulary(*data_, i, from, into, options_.vocab_size);
              });
  part.take(options_.suffix);
}

void FilePackedText::read(int64_t index, std::span<int64_t> tokens,
                          std::vector<int32_t>& starts) const {
  starts.clear();
  int64_t at = 0;
  for (const SequencePiece& piece : order_->pieces(index)) {
    starts.push_back(static_cast<int32_t>(at));
    read_part(piece.sequence, piece.offset,
              tokens.subspan(static_cast<size_t>(at), static_cast<size_t>(piece.count)));
    at += piece.count;
  }
  MEGATRON_CHECK(at == std::ssize(tokens), data_->prefix(), ": sample ", index,
                 " of the cached order has ", at, " tokens, expected ", tokens.size(),
                 "\nhint: remove the cache folder");
}

void FilePackedText::describe(JsonWriter& json) const {
  json.member("file", std::filesystem::path(data_->prefix()).filename().string());
  json.member("index_hash", data_->index_hash()).member("num_tokens", data_->num_tokens());
  json.member("split", to_string(split_))
      .member("first_document", first_)
      .member("last_document", last_);
  if (num_samples_) json.member("num_samples", *num_samples_);
  describe_packing(options_, json);
}

// A sample has up to kDocuments documents of its own, again and again until it is full.
class MockPackedText final : public PackedText {
 public:
  MockPackedText(Split split, int64_t num_samples, const MockSentenceIds& ids,
                 const PackedTextOptions& options)
      : num_samples_(num_samples), options_(options) {
    const SentenceSourceOptions document{
        .max_length = options.sequence_length - num_specials(options),
        .seed = options.seed,
        .vocab_size = options.vocab_size};
    documents_ = mock_sentences(split, kDocuments * num_samples, ids, document);
  }
  int64_t size() const override { return num_samples_; }
  void read(int64_t index, std::span<int64_t> tokens, std::vector<int32_t>& starts) const override {
    MEGATRON_CHECK(index >= 0 && index < num_samples_, "there is no sample ", index, " of ",
                   num_samples_);
    starts.clear();
    SentenceRun run;
    int64_t at = 0;
    for (int64_t k = 0; at < std::ssize(tokens); ++k) {
      documents_->read(index * kDocuments + k % kDocuments, run);
      PartReader part(0, tokens.subspan(static_cast<size_t>(at)));
      starts.push_back(static_cast<int32_t>(at));
      part.take(options_.prefix);
      part.take(run.tokens);
      part.take(options_.suffix);
      at += std::ssize(run.tokens) + num_specials(options_);
    }
  }
  void describe(JsonWriter& json) const override {
    documents_->describe(json);
    describe_packing(options_, json);
  }

 private:
  static constexpr int64_t kDocuments = 16;
  const int64_t num_samples_;
  const PackedTextOptions options_;
  std::unique_ptr<const SentenceSource> documents_;
};

}  // namespace

std::unique_ptr<const PackedText> packed_text_of_file(std::shared_ptr<const IndexedDataset> data,
                                                      std::pair<double, double> bounds, Split split,
                                                      std::optional<int64_t> num_samples,
                                                      const PackedTextOptions& options) {
  return std::make_unique<FilePackedText>(std::move(data), bounds, split, num_samples, options);
}

std::unique_ptr<const PackedText> mock_packed_text(Split split, int64_t num_samples,
                                                   const MockSentenceIds& ids,
                                                   const PackedTextOptions& options) {
  return std::make_unique<MockPackedText>(split, num_samples, ids, options);
}

}  // namespace megatron
