// The contents of a checkpoint's `manifest.json`: which file holds which part of which logical
// tensor, and the checksums of every byte. Grammar: docs/formats/checkpoint.md.
//
// A directory is a checkpoint if and only if its manifest is complete. No parallel layout is
// recorded: fragments are boxes of global tensors, so a reader needs only the parts it wants.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

inline constexpr int kCheckpointFormatVersion = 1;
inline constexpr uint64_t kCheckpointBlockBytes = 1 << 20;
inline constexpr const char* kManifestName = "manifest.json";

// A part of a logical tensor as it lies in a file: the elements [flat_begin, flat_end) of the
// row-major box, contiguous.
struct Fragment {
  int file = 0;  // index in Manifest::files
  // Offset in the file's data section; a multiple of the element's size, except in files of another
  // program.
  uint64_t offset = 0;
  Box box;
  int64_t flat_begin = 0;
  int64_t flat_end = 0;
  // Set if the box is stored inside a larger matrix; at most one of the two is not 0, and only in
  // manifests that describe files of another program. Element (r, c) of the box, its only one of
  // other dimensions, lies row_stride * r + step * c elements after `offset`, or, if the file holds
  // the transpose, column_stride * c + step * r.
  int64_t column_stride = 0;
  int64_t row_stride = 0;
  int64_t step = 1;
  bool is_strided() const { return row_stride > 0 || column_stride > 0; }
};

struct StoredTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // global, without vocabulary padding
  std::vector<Fragment> fragments;
};

// Bytes that are in no file as they are: text from metadata, dequantised weights.
class ComputedBytes {
 public:
  virtual ~ComputedBytes() = default;
  // Bytes [offset, offset + bytes). May be called from several threads. Throws Error.
  virtual void read_at(uint64_t offset, void* out, size_t bytes) const = 0;
};

// A file of the checkpoint. The first header_bytes have one checksum; the data section that follows
// has one per block of kCheckpointBlockBytes (the last block is shorter).
struct StoredFile {
  std::string name;  // relative to the directory, with forward slashes
  uint64_t bytes = 0;
  uint64_t header_bytes = 0;  // 0 for files that are not safetensors
  uint64_t header_hash = 0;   // XXH3-64
  std::vector<uint64_t> block_hashes;
  bool has_checksums = true;  // false: a file of another program; only its size is verified
  std::shared_ptr<const ComputedBytes>
      source;  // set: of the bytes, in place of a file; no checksums
};

struct Manifest {
  int64_t iteration = 0;
  std::string created;       // UTC, ISO 8601
  std::string state = "{}";  // the caller's JSON object
  std::vector<StoredFile> files;
  std::map<std::string, StoredTensor> tensors;
};

// The text of manifest.json; its last member is the XXH3-128 of everything before it.
std::string encode_manifest(const Manifest& manifest);

// Parses and checks: checksum, version, every offset against its file, and that the fragments of
// every tensor cover it exactly once (unless `complete` is false: one rank's part). `name` is used
// in errors. Throws Error.
Manifest parse_manifest(std::string_view text, std::string_view name, bool complete = true);

// Throws Error unless the fragments of every tensor cover it exactly once and lie inside their
// files.
void check_manifest(const Manifest& manifest, std::string_view name);

}  // namespace megatron
