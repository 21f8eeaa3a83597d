#include <cuda_runtime.h>

#include "megatron/base/check.h"
#include "megatron/tensor/detail/pinned_memory.h"

namespace megatron {

std::shared_ptr<void> pinned_memory(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
  MEGATRON_CHECK(status == cudaSuccess, "no ", bytes >> 20,
                 " MiB of page-locked host memory: ", cudaGetErrorString(status),
                 "\nhint: `check` says how much a rank keeps there; --optimizer-offload-fraction "
                 "makes it less");
  return {memory, [](void* p) { cudaFreeHost(p); }};
}

}  // namespace megatron
