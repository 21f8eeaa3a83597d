// Work on a GPU that is recorded once and launched again as a whole (a CUDA graph): no host code
// runs between its kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace megatron {

// Memory that graphs share which never run at the same time: what one of them allocates and frees
// while it is recorded, the next may use.
class DeviceGraphPool {
 public:
  // Throws Error without CUDA.
  explicit DeviceGraphPool(c10::Device device);
  ~DeviceGraphPool();
  DeviceGraphPool(const DeviceGraphPool&) = delete;
  DeviceGraphPool& operator=(const DeviceGraphPool&) = delete;

 private:
  friend class DeviceGraph;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class DeviceGraph {
 public:
  // Records what `body` launches, backwards included; nothing of it runs. `body` must not wait for
  // the device, and must read what changes between launches from memory that outlives the graph.
  // Tensors that it makes and keeps live in the pool and hold a value after the first launch. The
  // pool outlives the graph.
  DeviceGraph(DeviceGraphPool& pool, const std::function<void()>& body);
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&&) noexcept;
  DeviceGraph& operator=(DeviceGraph&&) noexcept;

  // Runs it once, in the order of the current stream.
  void launch();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
