// Asynchronous loads of a thread into its own shared memory.
#pragma once

#include <cstdint>

// Note [Rings of loads]
// A kernel that reads a row, waits for a sum over it and writes it leaves memory idle while it
// waits. So the next rows are already being loaded: cp.async brings them to shared memory, since
// they would not fit into registers. Each thread copies the packs that it will read itself, so the
// ring needs no barrier.
namespace megatron {

// 16 bytes from global to shared memory, both aligned.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
// The same to an address of shared memory; zeros where not `inside`, `from` being valid anyway.
__device__ __forceinline__ void copy_async_or_zero(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
// Closes the group of this thread's copies since the last call; a group may be empty.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most the `Pending` newest groups of this thread are in flight.
template <int Pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace megatron
