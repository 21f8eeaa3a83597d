// Files of torch.save, stand-alone or embedded in a larger file: a zip archive of stored (never
// compressed) members, data.pkl and data/0, data/1, ... with the elements. One tensor or one plain
// value each; nothing is executed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/dist_checkpointing/foreign/pickle.h"

namespace megatron {

class InputFile;

// The directory of an archive in bytes [begin, begin + length) of a file. Keeps a reference to the
// file.
class TorchArchive {
 public:
  // `what` is used in errors. Throws Error if the bytes are no such archive, are truncated, or
  // refer outside themselves.
  TorchArchive(const InputFile& file, uint64_t begin, uint64_t length, std::string what);

  struct Member {
    std::string name;     // after the first slash
    uint64_t offset = 0;  // in the file
    uint64_t bytes = 0;
  };
  const Member* find(std::string_view name) const;  // null: none
  // data.pkl, whose checksum is verified.
  Pickle pickle(const Pickle::Known& known) const;

 private:
  const InputFile& file_;
  std::string what_;
  std::vector<Member> members_;
  std::vector<uint32_t> checksums_;
};

// A contiguous tensor of an archive: its type and shape, and where its elements lie in the file.
struct ArchivedTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  uint64_t offset = 0;
};
ArchivedTensor read_archived_tensor(const InputFile& file, uint64_t begin, uint64_t length,
                                    const std::string& what);

// The bytes before and after the elements in an archive of one tensor; `checksum`: their CRC-32.
struct ArchiveFrame {
  std::string before, after;
};
ArchiveFrame frame_of_tensor(DType dtype, const std::vector<int64_t>& shape, uint32_t checksum);

// An archive that holds a plain value (pickle::file).
std::string archive_of_pickle(const std::string& pickled);

// CRC-32 of zip archives, continued from `before`.
uint32_t crc32_of(uint32_t before, const void* data, size_t bytes);

}  // namespace megatron
