// The bytes of a file, decompressed if they are gzip or zstd (recognised by their first bytes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace megatron {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills up to `capacity` bytes; fewer only at the end, 0 after it. Throws Error naming the file
  // and the offset in it.
  virtual size_t read(char* out, size_t capacity) = 0;
  // Bytes of the file itself that were used so far.
  virtual uint64_t file_bytes_read() const = 0;
};

std::unique_ptr<ByteSource> open_bytes(const std::string& path);

}  // namespace megatron
