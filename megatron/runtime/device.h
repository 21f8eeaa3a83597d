// What a program needs to know of its device beyond tensors: name, memory, profiler marks.
// Without CUDA the marks do nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "megatron/reporting/timers.h"
#include "megatron/runtime/device_choice.h"
#include "megatron/runtime/memory_use.h"
#include "megatron/runtime/section_clock.h"

namespace megatron {

// Returns the GPU of this rank and makes it current, or the CPU. `local_rank`: rank within the
// machine. Throws Error if --device asks for a GPU and none of that model is found, the build has
// no CUDA, or the machine has fewer GPUs than ranks.
c10::Device choose_device(DeviceChoice choice, int local_rank = 0);

// "NVIDIA H200"; "cpu".
std::string device_name(const c10::Device& device);
MemoryUse memory_use(const c10::Device& device);
void synchronize(const c10::Device& device);

// CUDA: cudaProfilerStart and cudaProfilerStop, for nsys and ncu.
void start_device_profiler();
void stop_device_profiler();

// A timed region that is also an NVTX range and a section of SectionClock.
class Region {
 public:
  Region(Timers& timers, const char* name, int level, Section section = Section::kNone);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  ScopedTimer timer_;
  SectionScope section_;
};

}  // namespace megatron
