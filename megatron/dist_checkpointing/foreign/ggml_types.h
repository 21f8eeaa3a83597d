// Element types of the tensors in GGUF files. Quantised ones come in blocks of 32 or 256 elements
// of a row with their scales.
//
// Sources: ggml-quants.c of llama.cpp; quants.py of the Python package gguf, whose results these
// equal in every bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

struct GgmlType {
  uint32_t id = 0;        // in files
  std::string_view name;  // "Q4_K"
  int64_t block = 1;      // elements of a block
  int64_t bytes = 0;      // of a block
  // Converts `blocks` blocks to fp32. Null: not built.
  void (*decode)(const std::byte* in, int64_t blocks, float* out) = nullptr;

  bool is_quantized() const { return block > 1; }
};

// Null: no type that ggml ever had, or one that it has removed.
const GgmlType* find_ggml_type(uint32_t id);
const GgmlType* find_ggml_type(std::string_view name);
// "F32, F16, Q4_0, ...": those that are built.
std::string ggml_type_names();

}  // namespace megatron
