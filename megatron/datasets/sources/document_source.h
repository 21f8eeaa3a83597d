// Input of preprocess-data as a stream of chunks: JSON lines, text files and Parquet tables, read
// front to back in bounded memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace megatron {

enum class InputFormat { kAuto, kJsonl, kText, kParquet };

struct DocumentFile {
  std::string path;
  InputFormat format = InputFormat::kText;
};

// Expands arguments that are files or folders (searched recursively in path order, without hidden
// files). kAuto: .jsonl and .json are JSON lines, .parquet is Parquet, everything else text; in a
// folder .json counts as JSON lines only if every file is, and kinds must not be mixed. Throws
// Error for missing, empty or mixed input.
std::vector<DocumentFile> list_input_files(std::span<const std::string> inputs, InputFormat format);

// A part of the input that one worker tokenises.
struct Chunk {
  const DocumentFile* file = nullptr;
  std::string text;        // whole JSON lines, part of a text document, or rows of Parquet columns
  int64_t first_line = 1;  // JSON lines: number of the first line; Parquet: number of the first row
  uint64_t offset = 0;     // offset of `text` in the (decompressed) file
  bool starts_document = true, ends_document = true;  // text
  // Parquet: column c of row r is text[ends[c][r - 1] or ends[c - 1].back(), ends[c][r]).
  std::vector<std::vector<int64_t>> ends;
  uint64_t file_bytes = 0;  // bytes of the file on disk that this chunk covers
};

// Instead of column names of Parquet files: a single column of JSON objects that hold all columns
// of a row, including nested ones. Null members are omitted, except "content".
inline constexpr const char* kAllColumns = "*";
// The same with columns of bytes, as "data:;base64,..."; without it they are an error.
inline constexpr const char* kAllColumnsAndBytes = "**";

struct ChunkOptions {
  std::vector<std::string> keys;  // columns of Parquet files, or kAllColumns...
  size_t chunk_bytes = size_t{1} << 18;
  size_t text_piece_bytes = size_t{4} << 20;  // longer text documents are split
  bool sentence_pieces = false;               // split them into pieces of SentenceSplitter instead
  size_t max_line_bytes = size_t{32} << 20;   // also the longest text without a place to split
};

// Calls `emit` with each chunk in order until it returns false.
//
// A text document longer than a piece is split before a space between two ASCII letters or digits,
// which no byte-level pre-tokenizer joins; the positions depend only on its bytes.
void read_chunks(std::span<const DocumentFile> files, const ChunkOptions& options,
                 const std::function<bool(Chunk)>& emit);

}  // namespace megatron
