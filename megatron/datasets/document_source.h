// Input of preprocess-data as a stream of chunks: JSON lines, text files and Parquet tables, read
// front to back in bounded memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace megatron {

enum class InputFormat { kAuto, kJsonl, kText, kParquet };

struct InputFile {
  std::string path;
  InputFormat format = InputFormat::kText;
};

// The files behind arguments that are files or folders (searched through, in the order of their
// paths; hidden files are left out). kAuto: .jsonl and .json are JSON lines, .parquet is Parquet,
// everything else text; below a folder .json counts as JSON lines only when every file is, and
// kinds must not be mixed. Throws Error for what is missing, empty or mixed.
std::vector<InputFile> list_input_files(std::span<const std::string> inputs, InputFormat format);

// A part of the input that one worker turns into tokens.
struct Chunk {
  const InputFile* file = nullptr;
  std::string text;  // whole JSON lines, a part of a text document, or the rows of Parquet columns
  int64_t first_line = 1;  // JSON lines: number of the first line; Parquet: number of the first row
  uint64_t offset = 0;     // of `text` in the (decompressed) file
  bool starts_document = true, ends_document = true;  // text
  // Parquet: column c of row r is text[ends[c][r - 1] or ends[c - 1].back(), ends[c][r]).
  std::vector<std::vector<int64_t>> ends;
  uint64_t file_bytes = 0;  // bytes of the file on disk that this chunk stands for
};

// In place of the names of columns of Parquet files: one column, of JSON objects that hold all
// columns of a row, nested ones too. Members that are null are left out, but for "content".
inline constexpr const char* kAllColumns = "*";

struct ChunkOptions {
  std::vector<std::string> keys;  // columns of Parquet files, or kAllColumns
  size_t chunk_bytes = size_t{1} << 18;
  size_t text_piece_bytes = size_t{4} << 20;  // longer text documents are cut
  size_t max_line_bytes = size_t{32}
                          << 20;  // and the longest stretch of text without a place to cut
};

// Calls `emit` with each chunk in order until it returns false.
//
// A text document longer than a piece is cut before a space between two ASCII letters or digits,
// which no byte-level pre-tokenizer joins; where it is cut depends on its bytes alone.
void read_chunks(std::span<const InputFile> files, const ChunkOptions& options,
                 const std::function<bool(Chunk)>& emit);

}  // namespace megatron
