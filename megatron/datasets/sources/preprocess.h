// Converts text to indexed datasets: reads documents, tokenises them on all cores, and writes them
// in input order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "megatron/datasets/sources/document_source.h"
#include "megatron/tokenizers/sentence_splitter.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

struct PreprocessOptions {
  std::vector<std::string> inputs;  // files and folders
  InputFormat format = InputFormat::kAuto;
  std::vector<std::string> json_keys = {
      "text"};  // one dataset each: <output_prefix>_<key>_document, or ..._sentence
  std::string output_prefix;
  // Each sentence of a text is a sequence; null: each text is one. A list of strings is a document
  // whose sequences are these strings, either way.
  std::shared_ptr<const SentenceSplitter> splitter;
  bool append_eod = false;     // append the end-of-document token to each non-empty document
  bool overwrite = false;      // replace existing data sets; else they are an error
  std::string program;         // for the description of the data sets, as is
  std::string tokenizer_type;  // --tokenizer-type
  int workers = 0;             // 0: all cores
  int64_t log_interval = 0;    // documents between log lines; 0: none
  size_t max_line_bytes = size_t{32} << 20;   // of JSON lines
  size_t text_piece_bytes = size_t{4} << 20;  // see ChunkOptions
};

struct PreprocessedDataset {
  std::string prefix;
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
};

struct PreprocessResult {
  std::vector<PreprocessedDataset> datasets;  // one for each key
  int64_t num_files = 0;
  uint64_t text_bytes = 0;  // after decompression
  double seconds = 0;
};

// The result depends neither on the number of workers nor on timing. Memory is bounded for any
// input size. Throws Error that names file and line or byte offset; then no output is left.
PreprocessResult preprocess_files(const PreprocessOptions& options, const Tokenizer& tokenizer);

}  // namespace megatron
