// Forward and backward of a micro-batch as one CUDA graph each (--cuda-graph-impl local).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/tensor/device_graph.h"
#include "megatron/training/batch.h"

namespace megatron {

// Note [Micro-batches as CUDA graphs] A graph holds the launches of one pass forward and back; what
// differs between micro-batches (tokens, places, the loss scale) is copied into tensors of its own
// before each launch. The first pass of a step replaces gradients and later ones add to them, so
// each kind has its graph; both use the same memory. Since no host code runs in a launch, the store
// is told afterwards which gradients have come. The first steps are eager: kernels are loaded,
// algorithms chosen, caches filled. Micro-batches beside which gradients are reduced or weights
// gathered stay eager, so that this goes on under computation.
class MicrobatchGraphs {
 public:
  // `device` is a GPU (Error). The first `warmup_steps` steps are eager.
  MicrobatchGraphs(c10::Device device, int64_t warmup_steps);

  // Forward and backward. What it returns is added up over micro-batches: [2] fp64.
  using Pass = std::function<at::Tensor(const Batch& batch, const at::Tensor& loss_scale)>;

  // A step begins. Returns whether its passes may be graphs.
  bool begin_step();
  // Runs `pass` on a micro-batch through its graph, which is recorded at the first call for this
  // kind of micro-batch: shapes, presence of optional parts, `first` of its step or not. The result
  // is valid until the next call.
  const at::Tensor& run(const Batch& batch, const at::Tensor& loss_scale, bool first,
                        DistributedDataParallel& store, const Pass& pass);

 private:
  struct Inputs {
    Batch batch;
    at::Tensor loss_scale;
  };
  struct Recorded {
    bool first;
    std::shared_ptr<Inputs> inputs;
    std::vector<Parameter*> gradients;  // in the order in which they were reported
    at::Tensor result;
    std::unique_ptr<DeviceGraph> graph;
  };
  Recorded& find(const Batch& batch, const at::Tensor& loss_scale, bool first);

  DeviceGraphPool pool_;
  int64_t steps_left_;  // eager ones
  std::vector<Recorded> recorded_;
};

}  // namespace megatron
