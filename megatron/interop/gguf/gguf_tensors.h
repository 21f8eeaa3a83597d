// The tensors of a GGUF file as those of a Hugging Face folder: under its names, with its order of
// rows, and dequantised as they are read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/foreign/gguf_file.h"
#include "megatron/interop/foreign_tensors.h"

namespace megatron {

// Rows [outer, a, b, inner] of the file are rows [outer, b, a, inner] of the tensor.
struct RowOrder {
  int64_t a = 1, b = 1, inner = 1;
  bool is_same() const { return a == 1 || b == 1; }
  // The row in the file of row `row` of the tensor.
  int64_t in_file(int64_t row) const {
    const int64_t i = row % inner, x = row / inner % a, y = row / inner / a % b,
                  outer = row / inner / a / b;
    return ((outer * a + x) * b + y) * inner + i;
  }
};

// A tensor, or a part of one, as the model sees it.
struct GgufPart {
  const GgufTensor* tensor = nullptr;
  std::string name;            // of Hugging Face
  std::vector<int64_t> shape;  // of the part
  int64_t first = 0;           // its first element in the tensor
  RowOrder order;
  float shift = 0.0f;  // is added to every element
  // Of latent attention: `tensor` is [heads, columns, keys] and this [heads, values, columns]; rows
  // are, by head, those of keys and then those of values. Null: not so.
  const GgufTensor* values = nullptr;
};

// The parts as one file of tensors. Quantised tensors are fp32, others keep their type, unless the
// file mixes quantised and 16-bit matrices: then all are fp32, since the parts of a parameter must
// have one type. `file` stays open. Throws Error for types that are not built.
TensorFiles gguf_tensor_files(std::shared_ptr<const GgufFile> file, std::vector<GgufPart> parts);

}  // namespace megatron
