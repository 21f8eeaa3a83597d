// Reads golden files made with other frameworks.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

// `bytes` uint8 [..., 3]: integers, the low byte first, two's complement; returns fp64 [...].
inline at::Tensor golden_gradient(const at::Tensor& bytes, double scale) {
  const at::Tensor wide = bytes.to(at::kLong);
  const at::Tensor value =
      wide.select(-1, 0) + wide.select(-1, 1) * 256 + wide.select(-1, 2) * 65536;
  return at::where(value >= 1 << 23, value - (1 << 24), value).to(at::kDouble) * scale;
}

// By their names; gradients that tests/golden/packed_gradients.py packed as fp64.
inline std::map<std::string, at::Tensor> read_golden_tensors(const SafetensorsFile& file) {
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.header().tensors) {
    at::Tensor tensor = at::empty(entry.shape, to_scalar_type(entry.dtype));
    file.read(entry, tensor.data_ptr());
    tensors[entry.name] = tensor;
  }
  if (const auto scales = tensors.extract("scales")) {
    int64_t next = 0;
    for (auto& [name, tensor] : tensors)
      if (name.find("grad/") != std::string::npos)
        tensor = golden_gradient(tensor, scales.mapped()[next++].item<double>());
    MEGATRON_CHECK(next == scales.mapped().size(0), "scales of another number of gradients");
  }
  return tensors;
}

inline size_t count_gradients(const std::map<std::string, at::Tensor>& golden) {
  size_t count = 0;
  for (const auto& [name, tensor] : golden) count += name.starts_with("grad/");
  return count;
}

}  // namespace megatron
