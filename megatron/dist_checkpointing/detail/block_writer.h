// Writes a file of a checkpoint and computes its checksums while writing.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

class BlockWriter {
 public:
  // `name` is relative to `directory`; `header` is the part with its own checksum, `data_bytes` the
  // size of the data that follows. `progress` is called after each block.
  BlockWriter(const std::filesystem::path& directory, std::string name, std::string_view header,
              uint64_t data_bytes, std::function<void()> progress = {});
  void write(const void* data, size_t bytes);
  // Flushes, fsyncs, closes; returns the file's manifest entry.
  StoredFile finish();

 private:
  void flush();
  StoredFile file_;
  OutputFile out_;
  std::vector<std::byte> buffer_;
  std::function<void()> progress_;
};

}  // namespace megatron
