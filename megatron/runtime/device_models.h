// GPU models that `--device` may name: their memory, and the rates that `megatron check` uses for
// estimates.
#pragma once

#include <cstdint>
#include <string_view>

#include "megatron/runtime/device_choice.h"

namespace megatron {

// Rates are per GPU. `measured`: true if measured with this program and NCCL on that GPU
// (docs/performance.md); else the data sheet's rates times the fraction that an H100 reaches.
struct DeviceModel {
  std::string_view name;       // "H100", as the driver's name of the GPU contains it
  int64_t memory_bytes;        // total that nvidia-smi shows
  double attained_fp32_flops;  // per second, in the layers of a model that fills the GPU
  double attained_bf16_flops;
  double attained_fp8_flops;
  // Bytes per second that a GPU sends to GPUs of its machine (NVLink)
  double inside_bandwidth;
  double network_bandwidth;  // ... to other machines: one 400 Gb/s adapter per GPU
  int64_t gpus_per_machine;
  bool measured;
};

// Memory outside of the allocator, as rough constants of the libraries: the CUDA context, modules
// and handles; NCCL's buffers of one communicator.
inline constexpr int64_t kCudaContextBytes = int64_t{600} << 20;
inline constexpr int64_t kCommunicatorBytes = int64_t{256} << 20;

// GPU memory of the rank that needs most: the allocator's peak, the CUDA context, NCCL's buffers.
struct DeviceVerdict {
  const DeviceModel* device = nullptr;
  int stage = 0;  // stage of that rank
  int64_t needed = 0;
  bool fits() const { return needed <= device->memory_bytes; }
};

// Null for auto, cpu and cuda.
const DeviceModel* device_model(DeviceChoice choice);

}  // namespace megatron
