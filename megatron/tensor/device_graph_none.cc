#include "megatron/base/check.h"
#include "megatron/tensor/device_graph.h"

namespace megatron {

struct DeviceGraphPool::Impl {};
struct DeviceGraph::Impl {};

DeviceGraphPool::DeviceGraphPool(c10::Device) {
  throw Error("CUDA graphs need a GPU, this build has no CUDA\nhint: leave --cuda-graph-impl out");
}
DeviceGraphPool::~DeviceGraphPool() = default;

DeviceGraph::DeviceGraph(DeviceGraphPool&, const std::function<void()>&) {
  throw Error("this build has no CUDA");
}
DeviceGraph::~DeviceGraph() = default;
DeviceGraph::DeviceGraph(DeviceGraph&&) noexcept = default;
DeviceGraph& DeviceGraph::operator=(DeviceGraph&&) noexcept = default;
void DeviceGraph::launch() {}

}  // namespace megatron
