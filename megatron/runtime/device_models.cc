#include "megatron/runtime/device_models.h"

namespace megatron {

namespace {

constexpr int64_t kMiB = 1024 * 1024;
// SXM variants. H100 and H200: Llama-3-8B's layers at 600 TFLOP/s in bf16 and 1.38 times that in
// FP8; NCCL's ring over NVLink at 354 GB/s. B200: the same fractions of 2250 and 4500 TFLOP/s dense
// and of 900 GB/s.
constexpr DeviceModel kH100 = {"H100", 81559 * kMiB, 40e12, 600e12, 830e12, 354e9, 50e9, 8, true};
constexpr DeviceModel kH200 = {"H200", 143771 * kMiB, 40e12, 600e12, 830e12, 354e9, 50e9, 8, true};
constexpr DeviceModel kB200 = {"B200", 183359 * kMiB, 48e12, 1360e12, 1880e12,
                               700e9,  50e9,          8,     false};

}  // namespace

const DeviceModel* device_model(DeviceChoice choice) {
  switch (choice) {
    case DeviceChoice::kH100:
      return &kH100;
    case DeviceChoice::kH200:
      return &kH200;
    case DeviceChoice::kB200:
      return &kB200;
    case DeviceChoice::kAuto:
    case DeviceChoice::kCpu:
    case DeviceChoice::kCuda:
      break;
  }
  return nullptr;
}

}  // namespace megatron
