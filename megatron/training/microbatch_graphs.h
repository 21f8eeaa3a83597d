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

// Note [Micro-batches as CUDA graphs] A graph holds the kernel launches of one micro-batch, forward
// and backward; what differs between micro-batches (tokens, positions, the loss scale) is copied
// into its static input tensors before each launch. The first micro-batch of a step overwrites
// gradients and later ones accumulate, so there is one graph for each; both share one memory pool.
// As no host code runs during a graph, the store is told afterwards which gradients are complete.
// The first steps run eagerly, and so does the first micro-batch of each combination of shapes:
// kernels are loaded, algorithms chosen, caches filled, which a capture does not allow.
// Encoders of media run eagerly before and behind a graph (Model::with_media_encoded): their shapes
// are those of a micro-batch's images and sounds, and hardly ever the same.
// Micro-batches that overlap with gradient reductions or weight gathers always run eagerly, to keep
// that overlap.
class MicrobatchGraphs {
 public:
  // The first `warmup_steps` steps run eagerly. Throws Error if `device` is not a GPU.
  MicrobatchGraphs(c10::Device device, int64_t warmup_steps);

  struct Result {
    at::Tensor totals;              // fp64, to be summed over micro-batches
    at::Tensor encoded_media_grad;  // of Batch::encoded_media; undefined: it needs none
  };
  // Forward and backward of one micro-batch.
  using Pass = std::function<Result(const Batch& batch, const at::Tensor& loss_scale)>;

  // Call at the start of a step. Returns whether its micro-batches may run as graphs.
  bool begin_step();
  // Whether this is the first micro-batch of its combination of shapes and optional tensors; the
  // next one is not. Such a micro-batch must run eagerly.
  bool is_new(const Batch& batch, const at::Tensor& loss_scale);
  // Runs `pass` on a micro-batch as a graph, which is captured at the first call for this
  // combination of shapes, optional tensors, and `first` (the first micro-batch of its step). The
  // result is valid until the next call.
  const Result& run(const Batch& batch, const at::Tensor& loss_scale, bool first,
                    DistributedDataParallel& store, const Pass& pass);

 private:
  struct Inputs {
    Batch batch;
    at::Tensor loss_scale;
  };
  struct Recorded {
    bool first;
    std::shared_ptr<Inputs> inputs;
    std::vector<Parameter*> gradients;  // in the order of their completion
    Result result;
    std::unique_ptr<DeviceGraph> graph;
  };
  // Null if is_new() has not seen such a micro-batch.
  std::shared_ptr<Inputs> inputs_of(const Batch& batch, const at::Tensor& loss_scale) const;
  Recorded& find(const Batch& batch, const at::Tensor& loss_scale, bool first);

  DeviceGraphPool pool_;
  int64_t steps_left_;                           // eager steps left
  std::vector<std::shared_ptr<Inputs>> inputs_;  // of each combination
  std::vector<Recorded> recorded_;
};

}  // namespace megatron
