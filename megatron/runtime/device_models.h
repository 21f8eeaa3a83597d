// GPU models that `--device` may name: their memory and the rates that `megatron check` plans with.
#pragma once

#include <cstdint>
#include <string_view>

#include "megatron/runtime/device_choice.h"

namespace megatron {

// Rates are per GPU. `measured`: with this program and NCCL on that GPU (docs/performance.md);
// otherwise scaled from the data sheet by the fraction that an H100 reaches.
struct DeviceModel {
  std::string_view name;       // "H100", as the driver's name of the GPU contains it
  int64_t memory_bytes;        // what nvidia-smi shows in all
  double attained_fp32_flops;  // per second, in the layers of a model that fills the GPU
  double attained_bf16_flops;
  double attained_fp8_flops;
  // Bytes per second that a GPU sends to GPUs of its machine (NVLink)
  double inside_bandwidth;
  double network_bandwidth;  // ... to other machines: one 400 Gb/s adapter per GPU
  int64_t gpus_per_machine;
  bool measured;
};

// Bytes that the rank which needs most takes on the GPU: the allocator's peak, the CUDA context,
// NCCL's buffers.
struct DeviceVerdict {
  const DeviceModel* device = nullptr;
  int stage = 0;  // of that rank
  int64_t needed = 0;
  bool fits() const { return needed <= device->memory_bytes; }
};

// Null for auto, cpu and cuda.
const DeviceModel* device_model(DeviceChoice choice);

}  // namespace megatron
