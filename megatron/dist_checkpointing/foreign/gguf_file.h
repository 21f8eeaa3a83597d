// GGUF, the file format of llama.cpp: little-endian, all offsets and counts of 64 bits.
//
//   "GGUF"  version  number of tensors  number of keys
//   keys      name, type, value: a number, a boolean, a string, or an array of those
//   tensors   name, number of dimensions, dimensions (the contiguous one first), type, offset
//   padding to general.alignment (32), then the tensors' data, each at its offset from there
//
// Strings are a length and bytes. The reader trusts nothing: counts, lengths, types, alignment and
// offsets are checked before any byte of a tensor is used, and every error names the key or tensor
// and where it lies. Values stay in the file until they are asked for: opening allocates at most
// the bytes of all names and 64 MiB, whatever the counts say. Source: docs/gguf.md of ggml.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/dist_checkpointing/foreign/ggml_types.h"

namespace megatron {

class InputFile;

struct GgufTensor {
  std::string name;
  const GgmlType* type = nullptr;
  std::vector<int64_t> shape;  // the contiguous dimension last
  uint64_t offset = 0;         // in the file
  uint64_t bytes = 0;
};

enum class GgufType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64
};

// Where a value lies.
struct GgufValue {
  GgufType type = GgufType::kUint8;  // of the elements, if it is an array
  bool is_array = false;
  uint64_t count = 1;   // elements
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;   // that all elements take in the file
};

// Safe to use from several threads.
class GgufFile {
 public:
  // Reads and checks everything but values of keys and data of tensors. Throws Error.
  explicit GgufFile(std::filesystem::path path);
  ~GgufFile();
  GgufFile(GgufFile&&) noexcept;

  const std::filesystem::path& path() const;
  int version() const;
  const std::vector<GgufTensor>& tensors() const;                     // in the file's order
  const GgufTensor* find_tensor(std::string_view name) const;         // null: none
  const std::map<std::string, GgufValue, std::less<>>& keys() const;  // by name

  // Values of keys. Absent: nothing. Throws Error for a value of another type or beyond the limits.
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;  // of any type; finite
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> text(std::string_view key, uint64_t most_bytes = 1 << 20) const;
  // Arrays of at most `most` elements, booleans as 0 and 1; a text has at most 1 MiB.
  std::optional<std::vector<int64_t>> integers(std::string_view key, uint64_t most) const;
  std::optional<std::vector<double>> numbers(std::string_view key, uint64_t most) const;
  std::optional<std::vector<std::string>> texts(std::string_view key, uint64_t most) const;

  // "FILE: key NAME at byte N": the beginning of a message about a key, which may be absent.
  std::string place(std::string_view key) const;
  // The same for a tensor.
  std::string place(const GgufTensor& tensor) const;

  // Bytes of the file.
  void read_at(uint64_t offset, void* out, size_t bytes) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Whether the path is a regular file that begins like a GGUF file, of whatever version.
bool is_gguf_file(const std::filesystem::path& path);

}  // namespace megatron
