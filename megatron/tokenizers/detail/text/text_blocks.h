// Reads text files (plain, gzip, zstd) as blocks of about a mebibyte that can be processed in any
// order.
//
// Block boundaries depend only on the file: plain text is split after a newline that is followed by
// a visible character, JSON lines between lines.
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
  // `paths` are files and folders; folders are searched recursively in sorted order, without hidden
  // and binary files. Files are JSON lines according to their names: *.jsonl, *.ndjson, and *.json
  // if given explicitly, each also with .gz or .zst.
  explicit TextBlockReader(const std::vector<std::filesystem::path>& paths);
  ~TextBlockReader();

  // Reads the next block; false at the end. Throws Error naming the file.
  bool next(TextBlock& block);

  int64_t num_files() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The documents of a block: its lines' members `keys` in order, or the whole text.
// Throws Error naming file and line.
std::vector<std::string> block_documents(const TextBlock& block,
                                         const std::vector<std::string>& keys);

}  // namespace megatron
