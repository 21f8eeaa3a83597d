// Gradient norm, clipping, and the AdamW or SGD update of master weights, over the flat shards of a
// model.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/optimizer_config.h"
#include "megatron/optimizer/optimizer_param_scheduler.h"

namespace megatron {

// Master weights and moments are fp32 (fp64 for fp64 models). When the model itself is fp32 or fp64
// the value is the master weight and there is no copy. With a precision-aware optimizer each may be
// bf16, rounded by chance: master weights then are the bf16 values themselves. A draw depends on
// the parameter's name, the place of the element in the global tensor and the step, so that no
// layout changes it. Bytes per parameter with all of them in bf16: 2 + 2 + 2, and the gradient's 4.
//
// With optimizer_cpu_offload the states of a part of the parameters, the last ones of the buffers,
// lie in host memory and are updated there (host_states.h). Bits on a CPU, formats and names are
// the same; on a GPU the step waits for the device.
//
// What a step decides on (skip, scale, counts, learning rate) is one record on the model's device,
// so that step() never waits for it; see kernels/step_control.h. Embedding and output weights
// decay; one-dimensional parameters and biases do not. With sharded optimizer states
// (DistributedDataParallelConfig) a rank holds states of its shards alone, updates those, and has
// the values gathered. The gradient norm counts each logical element once, over all model chunks of
// all ranks. Keeps references to the models' stores and to their groups, which must outlive it. Not
// thread safe.
class Optimizer {
 public:
  // One store per model chunk of this rank. Values must be initialised before, or reload_masters()
  // be called after. Frozen parameters are left alone.
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            std::vector<DistributedDataParallel*> models);
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            DistributedDataParallel& model);
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // What the loss sum is multiplied with before backward: [] on the device, fp32 (fp64 for fp64
  // models); 1 unless fp16. Take it anew for each step.
  at::Tensor loss_scale_tensor() const;

  // One update from the synchronised gradients.
  //   total_weight  [] or [1] any floating type: weight of the losses of this step, summed over
  //                 micro-batches and ranks; zero
  //                 (no token had weight) divides by one
  //   samples       of this step over all ranks; a skipped step does not advance the schedules
  // Communication: all-reduce of one double over the shard group and one over model_parallel;
  // values_changed() of the stores.
  void step(const at::Tensor& total_weight, int64_t samples);
  void step(double total_weight, int64_t samples);

  // Copies the record to the host; waits for the device.
  StepState read_state() const;
  // The same without waiting: the record as bytes, [sizeof(StepState)] uint8 on the device, to be
  // copied asynchronously.
  const at::Tensor& state_tensor() const;
  // Whether the stop rule (--max-consecutive-bad-steps) asks to end the run.
  bool must_stop(const StepState& state) const;

  const ParameterSchedule& schedule() const;
  void set_schedule(const ParameterSchedule& schedule);  // of a checkpoint, after resume_schedule()
  void load_state(const StepState& state);

  // Every tensor of the state in model order:
  // optimizer.state.{fp32_param,exp_avg,exp_avg_sq,momentum_buffer}.<name>. See
  // DistributedDataParallel::state().
  std::vector<StateTensor> tensors() const;
  // Master weights again from the values (--no-load-optim, --finetune, weights of another run).
  void reload_masters();
  // To be called after values were loaded together with tensors(): the optimizer may have copies of
  // values in host memory.
  void reload_values();
  // Values again from the master weights (after masters were loaded into tensors()). Collective.
  void store_values();

  // Figures for the log, over all ranks; each is collective and waits for the device. Gradients:
  // those of the latest step.
  double num_zeros() const;
  double params_norm() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
