// Gradient norm, clipping, and the AdamW or SGD update of master weights, over the flat buffers of a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/optimizer_config.h"
#include "megatron/optimizer/optimizer_param_scheduler.h"

namespace megatron {

// One stored tensor of the optimizer, shaped like its parameter.
struct OptimizerTensor {
  std::string key;       // "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
  Parameter* parameter;  // placement and global shape are its own
  at::Tensor tensor;     // a view of the optimizer's buffer, on the model's device; write to load
};

// Master weights and moments are fp32 (fp64 for fp64 models). When the model itself is fp32 or fp64 the value is the master
// weight and there is no copy.
//
// What a step decides on (skip, scale, counts, learning rate) is one record on the model's device, so that step() never
// waits for it; see kernels/step_control.h. Embedding and output weights decay; one-dimensional parameters and biases do not.
// Keeps references to the model's store and to its groups, which must outlive it. Not thread safe.
class Optimizer {
 public:
  // Values must be initialised before, or reload_masters() be called after. Frozen parameters are left alone.
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            DistributedDataParallel& model);
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            const std::vector<DistributedDataParallel*>& models) : Optimizer(config, schedule, *models.at(0)) {}
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // What the loss sum is multiplied with before backward: [] on the device, fp32 (fp64 for fp64 models); 1 unless fp16.
  // Take it anew for each step.
  at::Tensor loss_scale_tensor() const;

  // One update from the synchronised gradients.
  //   total_weight  [] or [1] any floating type: weight of the losses of this step, summed over micro-batches and ranks; zero
  //                 (no token had weight) divides by one
  //   samples       of this step over all ranks; a skipped step does not advance the schedules
  // Communication: all-reduce of one double over model_parallel.
  void step(const at::Tensor& total_weight, int64_t samples);
  void step(double total_weight, int64_t samples);

  // Copies the record to the host; waits for the device.
  StepState read_state() const;
  // The same without waiting: the record as bytes, [sizeof(StepState)] uint8 on the device, to be copied asynchronously.
  const at::Tensor& state_tensor() const;
  // Whether the stop rule (--max-consecutive-bad-steps) asks to end the run.
  bool must_stop(const StepState& state) const;

  const ParameterSchedule& schedule() const;
  void set_schedule(const ParameterSchedule& schedule);  // of a checkpoint, after resume_schedule()
  void load_state(const StepState& state);

  // Every tensor of the state in model order: optimizer.state.{fp32_param,exp_avg,exp_avg_sq,momentum_buffer}.<name>.
  std::vector<OptimizerTensor> tensors() const;
  // Master weights again from the values (--no-load-optim, --finetune, weights of another run).
  void reload_masters();
  // Values again from the master weights (after masters were loaded into tensors()).
  void store_values();

  // Figures for the log, over all model-parallel ranks; each waits for the device. Gradients: those of the latest step.
  double num_zeros() const;
  double params_norm() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
