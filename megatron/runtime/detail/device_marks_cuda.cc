#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include "megatron/runtime/detail/device_marks.h"

namespace megatron {

std::string detail_device_name(int index) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) return "unknown";
  return properties.name;
}

void detail_profiler(bool start) { start ? cudaProfilerStart() : cudaProfilerStop(); }
void detail_push_range(const char* name) { nvtxRangePushA(name); }
void detail_pop_range() { nvtxRangePop(); }

}  // namespace megatron
