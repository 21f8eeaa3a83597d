// The safetensors format: 8 bytes of little-endian header length, a JSON header padded with spaces
// to a multiple of 8, then the tensors' bytes, contiguous, little-endian and row-major, in the
// order of their offsets.
//
// The reader trusts nothing: header size, offsets, gaps, overlaps, duplicate names, shapes and
// element types are checked before any byte of data is used. Written files keep every element
// aligned to its own size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/dtype.h"

namespace megatron {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// One tensor of a file; `begin` and `end` are byte offsets from the start of the data section.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;        // by increasing begin
  std::map<std::string, std::string> metadata;  // "__metadata__"
  uint64_t data_begin = 0;                      // file offset of the data section
  uint64_t data_bytes = 0;
};

// Parses the header at the start of a file of `file_bytes` bytes. `bytes` holds at least the length
// and the header (more is ignored); `name` is used in errors. Throws Error.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, uint64_t file_bytes,
                                           std::string_view name);

// Orders the entries by decreasing element size (stable), assigns begin and end, and returns the
// length prefix and header text.
std::string encode_safetensors_header(std::vector<SafetensorsEntry>& entries,
                                      const std::map<std::string, std::string>& metadata);

// A file opened for reading. read() may be called from several threads.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::filesystem::path& path() const;
  const SafetensorsHeader& header() const;
  const SafetensorsEntry* find(std::string_view name) const;   // nullptr when absent
  const SafetensorsEntry& entry(std::string_view name) const;  // throws Error when absent
  // Reads all bytes of a tensor.
  void read(const SafetensorsEntry& entry, void* out) const;
  // Reads `bytes` bytes that start `offset` bytes into a tensor.
  void read(const SafetensorsEntry& entry, uint64_t offset, uint64_t bytes, void* out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  const void* data = nullptr;  // contiguous host memory
};

// Writes a file atomically: it appears completely or not at all.
void write_safetensors(const std::filesystem::path& path,
                       std::span<const SafetensorsTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace megatron
