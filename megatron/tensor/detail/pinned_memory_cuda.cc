#include <ATen/Parallel.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include "megatron/base/check.h"
#include "megatron/base/threads.h"
#include "megatron/tensor/detail/pinned_memory.h"

namespace megatron {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLarge = size_t{64} << 20;

void check_pinned(cudaError_t status, size_t bytes) {
  MEGATRON_CHECK(status == cudaSuccess, "no ", bytes >> 20,
                 " MiB of page-locked host memory: ", cudaGetErrorString(status),
                 "\nhint: `check` says how much a rank keeps there; --optimizer-offload-fraction "
                 "makes it less");
}

// cudaHostAlloc takes small pages, one after another: 400 GiB took more than three minutes. These
// are huge pages if the system has them, and all threads of the rank ask for them.
std::shared_ptr<void> large_pinned_memory(size_t bytes) {
  const size_t mapped = bytes + kHugePage;
  void* const base =
      ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check_pinned(base == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess, bytes);
  std::shared_ptr<void> mapping(base, [mapped](void* p) { ::munmap(p, mapped); });
  const auto first = reinterpret_cast<uintptr_t>(base);
  char* const memory =
      static_cast<char*>(base) + ((first + kHugePage - 1) / kHugePage * kHugePage - first);
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  constexpr int64_t kSmallPage = 4096;
  parallel_for(
      static_cast<int64_t>(bytes), kHugePage,
      [memory](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += kSmallPage)
          *static_cast<volatile char*>(memory + at) = 0;
      },
      at::get_num_threads());
  check_pinned(cudaHostRegister(memory, bytes, cudaHostRegisterPortable), bytes);
  return {memory, [mapping](void* p) { cudaHostUnregister(p); }};
}

}  // namespace

std::shared_ptr<void> pinned_memory(size_t bytes) {
  if (bytes >= kLarge) return large_pinned_memory(bytes);
  void* memory = nullptr;
  check_pinned(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), bytes);
  return {memory, [](void* p) { cudaFreeHost(p); }};
}

}  // namespace megatron
