#include "megatron/datasets/sources/preprocess.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/progress.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/detail/encoder.h"
#include "megatron/datasets/detail/ordered_pool.h"
#include "megatron/datasets/indexed_dataset_builder.h"

namespace megatron {
namespace {

// Limit of text in flight, for any number of workers: tokenising a byte of text needs up to eight
// bytes.
constexpr uint64_t kMaxBytesInFlight = uint64_t{48} << 20;

void check_options(const PreprocessOptions& options, std::span<const DocumentFile> files,
                   const Tokenizer& tokenizer) {
  MEGATRON_CHECK(!options.json_keys.empty(), "--json-keys is empty");
  const std::set<std::string> unique(options.json_keys.begin(), options.json_keys.end());
  MEGATRON_CHECK(unique.size() == options.json_keys.size(), "--json-keys names a key twice");
  const bool text = std::any_of(files.begin(), files.end(),
                                [](auto& file) { return file.format == InputFormat::kText; });
  MEGATRON_CHECK(!text || options.json_keys.size() == 1, "--json-keys names ",
                 options.json_keys.size(), " keys, but text files have only one text");
  MEGATRON_CHECK(!options.append_eod || tokenizer.eod(),
                 "--append-eod: the tokenizer has no end-of-document token");
}

// Writes encoded chunks in order.
class DatasetWriter {
 public:
  DatasetWriter(const PreprocessOptions& options, IndexedType type, int64_t eod) : eod_(eod) {
    for (const std::string& key : options.json_keys) {
      prefixes_.push_back(options.output_prefix + "_" + key +
                          (options.splitter ? "_sentence" : "_document"));
      refuse_existing_dataset(prefixes_.back(), options.overwrite);
    }
    for (size_t k = 0; k < prefixes_.size(); ++k) {
      builders_.push_back(std::make_unique<IndexedDatasetBuilder>(prefixes_[k], type));
    }
  }

  void write(const EncodedChunk& chunk) {
    if (chunk.is_text) return write_text(chunk);
    for (size_t k = 0; k < builders_.size(); ++k) write_documents(chunk.keys[k], *builders_[k]);
  }

  void finish(const DatasetDescription& description) {
    for (auto& builder : builders_) builder->finish(description);
  }

  std::vector<PreprocessedDataset> results() const {
    std::vector<PreprocessedDataset> out;
    for (size_t k = 0; k < builders_.size(); ++k) {
      out.push_back({prefixes_[k], builders_[k]->num_sequences(), builders_[k]->num_documents(),
                     builders_[k]->num_tokens()});
    }
    return out;
  }
  int64_t num_documents() const { return builders_[0]->num_documents(); }

 private:
  void write_documents(const EncodedKey& key, IndexedDatasetBuilder& builder) {
    const size_t width = key.sequence_lengths.empty() ? 1 : element_bytes(key);
    size_t at = 0, sequence = 0;
    for (const int64_t sequences : key.document_sequences) {
      for (int64_t i = 0; i < sequences; ++i) {
        const size_t bytes = key.sequence_lengths[sequence++] * width;
        builder.append_bytes(std::span(key.elements).subspan(at, bytes));
        builder.end_sequence();
        at += bytes;
      }
      builder.end_document();
    }
  }

  static size_t element_bytes(const EncodedKey& key) {
    int64_t elements = 0;
    for (const int64_t length : key.sequence_lengths) elements += length;
    return key.elements.size() / elements;
  }

  // A text document may span several chunks. Its last sequence stays open, because the document's
  // end may follow.
  void write_text(const EncodedChunk& chunk) {
    IndexedDatasetBuilder& builder = *builders_[0];
    const EncodedKey& key = chunk.keys[0];
    if (chunk.sentences)
      write_sentences(key, builder);
    else
      append_open(key.elements, builder);
    if (!chunk.ends_document) return;
    if (open_tokens_ > 0 && eod_ >= 0) builder.append(std::span<const int64_t>(&eod_, 1));
    close_sequence(builder);
    builder.end_document();
  }
  void write_sentences(const EncodedKey& key, IndexedDatasetBuilder& builder) {
    size_t at = 0;
    for (const int64_t length : key.sequence_lengths) {
      close_sequence(builder);
      const size_t bytes = static_cast<size_t>(length) * element_bytes(key);
      append_open(std::span(key.elements).subspan(at, bytes), builder);
      at += bytes;
    }
  }
  void append_open(std::span<const std::byte> elements, IndexedDatasetBuilder& builder) {
    const int64_t before = builder.num_tokens();
    builder.append_bytes(elements);
    open_tokens_ += builder.num_tokens() - before;
  }
  void close_sequence(IndexedDatasetBuilder& builder) {
    if (open_tokens_ > 0) builder.end_sequence();
    open_tokens_ = 0;
  }

  int64_t eod_;
  int64_t open_tokens_ = 0;
  std::vector<std::string> prefixes_;
  std::vector<std::unique_ptr<IndexedDatasetBuilder>> builders_;
};

uint64_t total_bytes(std::span<const DocumentFile> files) {
  uint64_t bytes = 0;
  for (const DocumentFile& file : files) bytes += std::filesystem::file_size(file.path);
  return bytes;
}

}  // namespace

PreprocessResult preprocess_files(const PreprocessOptions& options, const Tokenizer& tokenizer) {
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const std::vector<DocumentFile> files = list_input_files(options.inputs, options.format);
  check_options(options, files, tokenizer);
  const int workers = options.workers > 0 ? options.workers : available_cores();
  const int64_t eod = options.append_eod ? *tokenizer.eod() : -1;
  const IndexedType type = indexed_type_for_vocabulary(tokenizer.vocab_size());

  PreprocessResult result;
  result.num_files = static_cast<int64_t>(files.size());
  DatasetWriter writer(options, type, eod);
  ProgressBar progress("preprocess-data", total_bytes(files), "B");
  int64_t logged = 0;

  OrderedPool<Chunk, EncodedChunk> pool(workers, kMaxBytesInFlight,
                                        [](const Chunk& chunk) { return chunk.text.size() + 1; });
  const ChunkOptions chunk_options{.keys = options.json_keys,
                                   .text_piece_bytes = options.text_piece_bytes,
                                   .sentence_pieces = options.splitter != nullptr,
                                   .max_line_bytes = options.max_line_bytes};
  pool.run(
      [&](const auto& emit) { read_chunks(files, chunk_options, emit); },
      [&] {
        auto encoder = std::make_shared<ChunkEncoder>(tokenizer, options.json_keys, eod, type,
                                                      options.splitter.get());
        return [encoder](Chunk chunk) { return encoder->encode(std::move(chunk)); };
      },
      [&](const EncodedChunk& chunk) {
        writer.write(chunk);
        progress.advance(chunk.file_bytes);
        result.text_bytes += chunk.text_bytes;
        if (options.log_interval > 0 && writer.num_documents() / options.log_interval > logged) {
          logged = writer.num_documents() / options.log_interval;
          log_info(cat("processed ", format_count(writer.num_documents()), " documents, ",
                       format_bytes(static_cast<double>(result.text_bytes) / seconds()), "/s"));
        }
      });
  DatasetDescription description;
  description.program = options.program;
  description.tokenizer = identity_of(tokenizer, options.tokenizer_type);
  description.append_eod = options.append_eod;
  description.sources = options.inputs;
  writer.finish(description);
  progress.finish();
  result.datasets = writer.results();
  result.seconds = seconds();
  return result;
}

}  // namespace megatron
