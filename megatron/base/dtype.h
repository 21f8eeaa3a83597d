// Element types of tensors, files and kernels, without libtorch.
#pragma once

#include <cstdint>
#include <string_view>

namespace megatron {

enum class DType : uint8_t {
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
  kFloat8E4M3  // codes in files of other programs; nothing here computes with it
};

int64_t size_of(DType dtype);               // bytes of one element
std::string_view to_string(DType dtype);    // safetensors spelling: "F32", "BF16", "I64", ...
DType dtype_from_string(std::string_view);  // throws Error for an unknown spelling

}  // namespace megatron
