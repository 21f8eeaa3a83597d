#include "megatron/dist_checkpointing/detail/block_writer.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace megatron {

namespace {

constexpr uint64_t kWriteBackBlocks = 64;  // between two calls of OutputFile::write_back()

}  // namespace

BlockWriter::BlockWriter(const std::filesystem::path& directory, std::string name,
                         std::string_view header, uint64_t data_bytes,
                         std::function<void()> progress)
    : out_(directory / name, header.size() + data_bytes), progress_(std::move(progress)) {
  file_.name = std::move(name);
  file_.bytes = file_.header_bytes = header.size();
  file_.header_hash = header.empty() ? 0 : XXH3_64bits(header.data(), header.size());
  out_.write(header.data(), header.size());
  buffer_.reserve(kCheckpointBlockBytes);
}

void BlockWriter::write(const void* data, size_t bytes) {
  const std::byte* at = static_cast<const std::byte*>(data);
  file_.bytes += bytes;
  while (bytes > 0) {
    const size_t part = std::min(bytes, kCheckpointBlockBytes - buffer_.size());
    buffer_.insert(buffer_.end(), at, at + part);
    at += part;
    bytes -= part;
    if (buffer_.size() == kCheckpointBlockBytes) flush();
  }
}

void BlockWriter::flush() {
  if (buffer_.empty()) return;
  file_.block_hashes.push_back(XXH3_64bits(buffer_.data(), buffer_.size()));
  out_.write(buffer_.data(), buffer_.size());
  buffer_.clear();
  if (file_.block_hashes.size() % kWriteBackBlocks == 0) out_.write_back();
  if (progress_) progress_();
}

StoredFile BlockWriter::finish() {
  flush();
  out_.sync_and_close();
  return std::move(file_);
}

}  // namespace megatron
