// Loads that a thread starts now and waits for later, through shared memory of its own.
#pragma once

#include <cstdint>

// Note [Rings of loads]
// A kernel that reads a row, waits for a sum over it and writes it leaves memory idle while it
// waits. So the loads of the next rows are already under way: cp.async brings them to shared
// memory, which registers could not hold. Each thread copies the packs that it will read itself,
// so that no barrier guards the ring.
namespace megatron {

// 16 bytes from global to shared memory, both aligned.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// What this thread has copied since the last call is a group; a group may be empty.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Pending` of this thread's newest groups are under way.
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace megatron
