#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/tensor/torch.h"

namespace megatron {

struct DeviceGraphPool::Impl {
  at::cuda::MempoolId_t id;
  c10::cuda::CUDAStream stream;  // capture stream; the allocator reuses memory within one stream
};

DeviceGraphPool::DeviceGraphPool(c10::Device device) {
  MEGATRON_CHECK(device.is_cuda(), "CUDA graphs need a GPU, this run is on the CPU");
  impl_ = std::make_unique<Impl>(
      Impl{at::cuda::graph_pool_handle(),
           c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())});
}

DeviceGraphPool::~DeviceGraphPool() = default;

struct DeviceGraph::Impl {
  at::cuda::CUDAGraph graph;
};

DeviceGraph::DeviceGraph(DeviceGraphPool& pool, const std::function<void()>& body)
    : impl_(std::make_unique<Impl>()) {
  // The allocator of a device gives nothing back while another thread captures.
  static std::array<std::mutex, C10_COMPILE_TIME_MAX_GPUS> capturing;
  const std::lock_guard lock(capturing.at(static_cast<size_t>(pool.impl_->stream.device_index())));
  c10::cuda::device_synchronize();
  // Memory cached by eager passes is needed for the graph.
  c10::cuda::CUDACachingAllocator::emptyCache();
  const c10::cuda::CUDAStreamGuard guard(pool.impl_->stream);
  // Data loaders and checkpoint writers may call CUDA from their own threads meanwhile.
  impl_->graph.capture_begin(pool.impl_->id, cudaStreamCaptureModeThreadLocal);
  try {
    body();
  } catch (...) {
    try {
      impl_->graph.capture_end();  // also returns the allocator to its usual pool
    } catch (...) {                // report the first error
    }
    throw;
  }
  impl_->graph.capture_end();
}

DeviceGraph::~DeviceGraph() = default;
DeviceGraph::DeviceGraph(DeviceGraph&&) noexcept = default;
DeviceGraph& DeviceGraph::operator=(DeviceGraph&&) noexcept = default;

void DeviceGraph::launch() { impl_->graph.replay(); }

}  // namespace megatron
