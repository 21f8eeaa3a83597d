// Reads text files (plain, gzip, zstd) as blocks of about a mebibyte that can be worked on in any
// order.
//
// Where a block ends depends on the file alone: plain text is cut behind a newline that a visible
// character follows, JSON lines between lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace megatron {

struct TextBlock {
  std::string bytes;
  const std::filesystem::path* path = nullptr;  // belongs to the reader
  bool json_lines = false;
  int64_t first_line = 1;  // number in the file of the block's first line
};

class TextBlockReader {
 public:
  // `paths` are files and folders; folders are walked in sorted order, hidden and binary files in
  // them left out. A file is taken as JSON lines by its name: *.jsonl, *.ndjson, and *.json outside
  // of folders, each also with .gz or .zst.
  explicit TextBlockReader(const std::vector<std::filesystem::path>& paths);
  ~TextBlockReader();

  // Reads the next block; false at the end. Throws Error naming the file.
  bool next(TextBlock& block);

  int64_t num_files() const;
  uint64_t file_bytes() const;  // of all files, as they lie on disk

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The documents of a block: its lines' members `keys` in order, or the whole text.
// Throws Error naming file and line.
std::vector<std::string> block_documents(const TextBlock& block,
                                         const std::vector<std::string>& keys);

}  // namespace megatron
