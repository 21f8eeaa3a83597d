// One iteration: micro-batches forward and back, gradients summed over ranks, one optimizer step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/training/device.h"
#include "megatron/training/task.h"

namespace megatron {

// A model, the owner of its memory and its optimizer, in the order in which they have to be destroyed.
struct TrainedModel {
  std::unique_ptr<Module> module;
  std::unique_ptr<DistributedDataParallel> store;
  std::unique_ptr<Optimizer> optimizer;  // null with --skip-train
};

// What an iteration leaves on the device; read later, so that no step waits for the host.
struct StepOutcome {
  at::Tensor loss;   // [2] fp64: sum of the losses of all tokens and their weight, over all ranks
  at::Tensor state;  // bytes of StepState
};

// The numbers of an outcome on the host.
struct StepNumbers {
  double loss = 0;  // per token
  StepState state;
};

struct StepOptions {
  int64_t num_microbatches = 1;
  int64_t global_batch_size = 1;
  bool per_token_loss = true;       // false: the mean of the means of the micro-batches
  bool full_recomputation = false;  // gives the forward pass a tape
};

// Runs one iteration; `next_batch` gives its micro-batches in order.
StepOutcome train_step(TrainedModel& model, const PretrainTask& task, const StepOptions& options,
                       const std::function<Batch()>& next_batch, Timers& timers);

// Reads outcomes on the host one iteration late on a GPU, at once on a CPU.
class OutcomeReader {
 public:
  explicit OutcomeReader(c10::Device device);
  ~OutcomeReader();
  void push(const StepOutcome& outcome);
  // The oldest outcome that has not been popped. Waits for it. With `all` false keeps the newest one back on a GPU.
  bool pop(StepNumbers& numbers, bool all);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
