// GPU work that is captured once and replayed as a whole (a CUDA graph): no host code runs between
// its kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace megatron {

// Memory shared by graphs that never run at the same time: what one of them allocates and frees
// during its capture, the next may reuse.
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
  // Captures what `body` launches, backward passes included, without running it. `body` must not
  // wait for the device, and must read inputs that change between launches from memory that
  // outlives the graph. Tensors that it creates and keeps are in the pool and have values after the
  // first launch. The pool must outlive the graph.
  DeviceGraph(DeviceGraphPool& pool, const std::function<void()>& body);
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&&) noexcept;
  DeviceGraph& operator=(DeviceGraph&&) noexcept;

  // Runs it once, on the current stream.
  void launch();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
