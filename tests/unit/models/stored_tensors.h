// Tensors as stored in files, to compare byte for byte.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "megatron/base/dtype.h"

namespace megatron {

struct Stored {
  DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;
  bool operator==(const Stored&) const = default;
};
using Tensors = std::map<std::string, Stored>;

}  // namespace megatron
