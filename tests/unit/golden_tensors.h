// Reads golden files made with other frameworks: tensors, and gradients as 24-bit integers with a
// scale per tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

inline std::map<std::string, at::Tensor> read_golden_tensors(const SafetensorsFile& file) {
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.header().tensors) {
    at::Tensor tensor = at::empty(entry.shape, to_scalar_type(entry.dtype));
    file.read(entry, tensor.data_ptr());
    tensors[entry.name] = tensor;
  }
  return tensors;
}

// `bytes` [n, 3] uint8, the low one first, two's complement; returns fp64.
inline at::Tensor golden_gradient(const at::Tensor& bytes, double scale, at::IntArrayRef shape) {
  const at::Tensor wide = bytes.to(at::kLong);
  const at::Tensor value = wide.select(1, 0) + wide.select(1, 1) * 256 + wide.select(1, 2) * 65536;
  const at::Tensor centered = at::where(value >= 1 << 23, value - (1 << 24), value);
  return (centered.to(at::kDouble) * scale).view(shape);
}

}  // namespace megatron
