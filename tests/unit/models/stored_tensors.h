// Tensors as stored in files, to compare byte for byte.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/dist_checkpointing/safetensors.h"

namespace megatron {

struct Stored {
  DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;
  bool operator==(const Stored&) const = default;
};
using Tensors = std::map<std::string, Stored>;

inline Tensors read_stored_tensors(const std::filesystem::path& path) {
  Tensors tensors;
  const SafetensorsFile file(path);
  for (const SafetensorsEntry& entry : file.header().tensors) {
    Stored stored{entry.dtype, entry.shape, std::string(entry.end - entry.begin, '\0')};
    file.read(entry, stored.bytes.data());
    tensors[entry.name] = std::move(stored);
  }
  return tensors;
}

}  // namespace megatron
