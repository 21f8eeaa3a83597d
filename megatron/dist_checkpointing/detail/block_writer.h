// Writes a file of a checkpoint and computes its checksums on the way.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

class BlockWriter {
 public:
  // `name` is relative to `directory`; `header` is the part with a checksum of its own, `data_bytes` what will follow.
  BlockWriter(const std::filesystem::path& directory, std::string name, std::string_view header, uint64_t data_bytes);
  void write(const void* data, size_t bytes);
  // Flushes, fsyncs, closes; the file's entry in the manifest.
  StoredFile finish();

 private:
  void flush();
  StoredFile file_;
  OutputFile out_;
  std::vector<std::byte> buffer_;
};

}  // namespace megatron
