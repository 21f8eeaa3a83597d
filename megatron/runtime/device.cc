#include "megatron/runtime/device.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/runtime/detail/device_marks.h"
#include "megatron/runtime/device_models.h"
#include "megatron/tensor/torch.h"

namespace megatron {

namespace {

// Note [Hardware queues] CUDA streams share the GPU's hardware work queues; there are 8 unless this
// variable, read when CUDA starts, sets another number. A receive that waits for its peer would
// block unrelated work queued after it, which the peer may be waiting for: a middle stage of a
// pipeline has more than 8 streams.
constexpr int kMostQueues = 32;
void use_all_queues(bool tell) {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
  const char* given = std::getenv(kVariable);
  if (tell && given != nullptr && std::atoi(given) < kMostQueues)
    log_warning(cat(kVariable, "=", given, " is not used: ", kMostQueues,
                    " is, since no overlap here needs fewer and pipelines need more"));
  setenv(kVariable, cat(kMostQueues).c_str(), 1);
}

}  // namespace

c10::Device choose_device(DeviceChoice choice, int local_rank) {
  if (choice != DeviceChoice::kCpu) use_all_queues(local_rank == 0);
  const bool has_gpu = at::globalContext().hasCUDA();
  MEGATRON_CHECK(choice == DeviceChoice::kAuto || choice == DeviceChoice::kCpu || has_gpu,
                 "no usable GPU is found, but --device asks for one\nhint: use --device cpu, or a "
                 "build with CUDA on a machine with a GPU");
  if (choice == DeviceChoice::kCpu || !has_gpu) return c10::Device(c10::kCPU);
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  MEGATRON_CHECK(local_rank < guard.deviceCount(), "rank ", local_rank,
                 " of this machine has no GPU of its own: there are ",
                 static_cast<int>(guard.deviceCount()),
                 "\nhint: start as many ranks as there are GPUs, or use --device cpu");
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank));
  guard.setDevice(device);
  const DeviceModel* model = device_model(choice);
  MEGATRON_CHECK(model == nullptr || device_name(device).find(model->name) != std::string::npos,
                 "--device asks for an ", model == nullptr ? "" : model->name,
                 ", but this rank has an ", device_name(device),
                 "\nhint: --device cuda takes any GPU");
  return device;
}

std::string device_name(const c10::Device& device) {
  return device.is_cuda() ? detail_device_name(device.index()) : "cpu";
}

MemoryUse memory_use(const c10::Device& device) {
  MemoryUse use;
  use.resident = resident_bytes();
  if (!device.is_cuda()) return use;
  const auto stats = at::getDeviceAllocator(c10::kCUDA)->getDeviceStats(device.index());
  constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  use.reserved = stats.reserved_bytes[kAggregate].current;
  use.allocated = stats.allocated_bytes[kAggregate].current;
  use.max_allocated = stats.allocated_bytes[kAggregate].peak;
  use.num_allocations = stats.allocation[kAggregate].current;
  return use;
}

void synchronize(const c10::Device& device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

void start_device_profiler() { detail_profiler(true); }
void stop_device_profiler() { detail_profiler(false); }

Region::Region(Timers& timers, const char* name, int level, Section section)
    : timer_(timers, name, level), section_(timers.sections(), section) {
  detail_push_range(name);
}
Region::~Region() { detail_pop_range(); }

}  // namespace megatron
