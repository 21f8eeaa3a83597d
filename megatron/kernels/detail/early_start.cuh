// Kernels that begin before the one ahead of them in the stream has ended (programmatic dependent
// launch of Hopper). What the one ahead writes may be read behind wait_for_kernel_ahead() alone.
#pragma once

#include "megatron/kernels/detail/cuda_types.cuh"

namespace megatron {

// Until the kernel ahead has ended and its writes are visible. Does nothing in a kernel that was
// not started early.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From now on the next kernel may begin, if it is one that is started early. In a kernel that was
// itself started early only behind wait_for_kernel_ahead(): else the next one would see less than
// what its own wait promises.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// An attribute of the launch of a kernel that is started early.
inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace megatron
