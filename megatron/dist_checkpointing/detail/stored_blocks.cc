#include "megatron/dist_checkpointing/detail/stored_blocks.h"

#include <xxhash.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {

std::string read_manifest_text(const InputFile& file) {
  MEGATRON_CHECK(file.size() <= kMaxManifestBytes, file.path().string(), ": is ", file.size(),
                 " bytes long; a manifest has at most ", kMaxManifestBytes);
  std::string text(file.size(), '\0');
  file.read_at(0, text.data(), text.size());
  return text;
}

uint64_t block_size(const StoredFile& file, uint64_t block) {
  const uint64_t data = file.bytes - file.header_bytes;
  return std::min(kCheckpointBlockBytes, data - block * kCheckpointBlockBytes);
}

StoredBytes::StoredBytes(const std::filesystem::path& directory, const StoredFile& file)
    : file_(file) {
  if (file.source) return;
  in_ = std::make_unique<InputFile>(directory / file.name);
  check_size(*in_, file);
}

void StoredBytes::read_at(uint64_t offset, void* out, size_t bytes) const {
  if (in_)
    in_->read_at(offset, out, bytes);
  else
    file_.source->read_at(offset, out, bytes);
}

void read_block(const StoredBytes& in, const StoredFile& file, uint64_t block,
                std::vector<std::byte>& buffer) {
  if (in.on_disk() != nullptr) return read_block(*in.on_disk(), file, block, buffer);
  buffer.resize(block_size(file, block));
  in.read_at(file.header_bytes + block * kCheckpointBlockBytes, buffer.data(), buffer.size());
}

void read_block(const InputFile& in, const StoredFile& file, uint64_t block,
                std::vector<std::byte>& buffer) {
  const uint64_t offset = file.header_bytes + block * kCheckpointBlockBytes;
  buffer.resize(block_size(file, block));
  in.read_at(offset, buffer.data(), buffer.size());
  if (!file.has_checksums) return;
  MEGATRON_CHECK(XXH3_64bits(buffer.data(), buffer.size()) == file.block_hashes[block],
                 in.path().string(), ": the checksum of bytes ", offset, " to ",
                 offset + buffer.size(),
                 " does not match\nhint: the file was damaged after it was written");
}

void check_size(const InputFile& in, const StoredFile& file) {
  MEGATRON_CHECK(in.size() == file.bytes, in.path().string(), ": is ", in.size(),
                 " bytes long, the manifest says ", file.bytes);
}

void verify_header(const InputFile& in, const StoredFile& file) {
  check_size(in, file);
  if (file.header_bytes == 0) return;
  std::vector<std::byte> header(file.header_bytes);
  in.read_at(0, header.data(), header.size());
  MEGATRON_CHECK(XXH3_64bits(header.data(), header.size()) == file.header_hash, in.path().string(),
                 ": the checksum of its header does not match\nhint: the file was damaged after it "
                 "was written");
  parse_safetensors_header(header, file.bytes, in.path().string());
}

}  // namespace megatron
