// Ranks that are threads, each with its own stream, on one GPU or on several.
#pragma once

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdlib>
#include <functional>
#include <memory>

#include "megatron/comm/thread_backend.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/forwarding_backend.h"

namespace megatron {

// Before CUDA starts: a kernel that is loaded when it is first launched waits for its GPU, which
// may be waiting for the signal of another rank, whose thread waits for the driver of the same
// process.
[[maybe_unused]] inline const int kLoadKernelsAtStart =
    setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/1);

// Collectives of threads on tensors in device memory: through host memory, after what the current
// stream holds.
class StagedBackend final : public CollectivesOnlyBackend {
 public:
  using CollectivesOnlyBackend::CollectivesOnlyBackend;
  std::shared_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op) override {
    const at::Tensor host = tensor.cpu();
    return finish(inner_->all_reduce(host, op), tensor, host);
  }
  std::shared_ptr<Work> all_gather(at::Tensor output, at::Tensor input) override {
    const at::Tensor host = at::empty_like(output, at::kCPU);
    return finish(inner_->all_gather(host, input.cpu()), output, host);
  }
  std::shared_ptr<Work> reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op) override {
    const at::Tensor host = at::empty_like(output, at::kCPU);
    return finish(inner_->reduce_scatter(host, input.cpu(), op), output, host);
  }
  std::shared_ptr<Backend> subgroup(const std::vector<int>& ranks, const std::string& name,
                                    CommunicatorUse use) override {
    return std::make_shared<StagedBackend>(inner_->subgroup(ranks, name, use));
  }

 private:
  static std::shared_ptr<Work> finish(const std::shared_ptr<Work>& work, at::Tensor& device,
                                      const at::Tensor& host) {
    work->wait();
    device.copy_(host);
    return work;
  }
};

// body(world, device), each rank with a current stream of its own.
inline void run_gpu_ranks(
    int size, const std::function<void(const std::shared_ptr<Backend>&, at::Device)>& body) {
  run_ranks(size, [&](const std::shared_ptr<Backend>& world) {
    const auto index = static_cast<c10::DeviceIndex>(world->rank() % c10::cuda::device_count());
    const c10::cuda::CUDAStreamGuard guard(
        c10::cuda::getStreamFromPool(/*isHighPriority=*/false, index));
    body(std::make_shared<StagedBackend>(world), at::Device(at::kCUDA, index));
    c10::cuda::device_synchronize();
    world->barrier();
  });
}

}  // namespace megatron
