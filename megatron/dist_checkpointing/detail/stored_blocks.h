// Reads the files of a checkpoint in checksummed blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/manifest.h"

namespace megatron {

// Larger manifests are refused; that of a checkpoint of 10 TB by 10,000 ranks has about 1 GiB.
inline constexpr uint64_t kMaxManifestBytes = uint64_t{4} << 30;

// The whole manifest file.
std::string read_manifest_text(const InputFile& file);

// Bytes of a block of the data section; the last block is shorter.
uint64_t block_size(const StoredFile& file, uint64_t block);

// A file of a checkpoint, opened: on disk, with the size that the manifest says, or its source.
// Keeps a reference to `file`.
class StoredBytes {
 public:
  // Throws Error.
  StoredBytes(const std::filesystem::path& directory, const StoredFile& file);
  void read_at(uint64_t offset, void* out, size_t bytes) const;
  // Null: not on disk.
  const InputFile* on_disk() const { return in_.get(); }

 private:
  const StoredFile& file_;
  std::unique_ptr<InputFile> in_;
};

// Reads one block and compares its checksum. Throws Error that names the file and the bytes.
void read_block(const InputFile& in, const StoredFile& file, uint64_t block,
                std::vector<std::byte>& buffer);
void read_block(const StoredBytes& in, const StoredFile& file, uint64_t block,
                std::vector<std::byte>& buffer);

// Throws Error unless the file has the size that the manifest says.
void check_size(const InputFile& in, const StoredFile& file);

// Verifies size and header of a file; its blocks are verified elsewhere.
void verify_header(const InputFile& in, const StoredFile& file);

}  // namespace megatron
