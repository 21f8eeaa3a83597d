// Gradient norm, clipping, and the update of master weights by a rule (update_rules.h), over the
// flat shards of a model.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/optimizer/optimizer_config.h"
#include "megatron/optimizer/optimizer_param_scheduler.h"

namespace megatron {

struct UpdateRule;

// Master weights and moments are fp32 (fp64 for fp64 models). When the value itself is fp32 or
// fp64, by the model's type or as the parameter's own, it is the master weight; there is no copy.
// With a precision-aware optimizer each may be bf16, rounded by chance: master weights then are the
// bf16 values themselves. A draw depends on the parameter's name, the place of the element in the
// global tensor and the step, so that no layout changes it. Bytes per parameter with all of them in
// bf16: 2 + 2 + 2, and the gradient's 4.
//
// With optimizer_cpu_offload the states of part of the parameters, the last ones of the buffers,
// are in host memory and are updated there (host_states.h). Results on a CPU are bit-equal, and
// formats and names are the same; on a GPU step() waits for the device.
//
// What a step decides (skip, scale, counts, learning rate) is one record on the model's device, so
// that step() never waits for it; see kernels/step_control.h. Embedding and output weights decay;
// one-dimensional parameters and biases do not. With sharded optimizer states
// (DistributedDataParallelConfig) a rank holds and updates only the states of its shards, and the
// values are then gathered. The gradient norm counts each logical element once, over all model
// chunks of all ranks. Keeps references to the models' stores and to their groups, which must
// outlive it. Not thread safe.
class Optimizer {
 public:
  // One store per model chunk of this rank. Initialise the values before, or call reload_masters()
  // after. Frozen parameters are not touched.
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            std::vector<DistributedDataParallel*> models);
  Optimizer(const OptimizerConfig& config, const ParameterSchedule& schedule,
            DistributedDataParallel& model);
  // The same by a rule that need not be in the table, and which must outlive the optimizer.
  Optimizer(const UpdateRule& rule, const OptimizerConfig& config,
            const ParameterSchedule& schedule, std::vector<DistributedDataParallel*> models);
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // The factor of the loss sum before backward: [] on the device, fp32 (fp64 for fp64 models); 1
  // unless fp16. Fetch it again for each step.
  at::Tensor loss_scale_tensor() const;

  // One update from the synchronised gradients.
  //   total_weight  [] or [1] any floating type: weight of the losses of this step, summed over
  //                 micro-batches and ranks; zero
  //                 (no token had weight) divides by one
  //   samples       of this step over all ranks; a skipped step does not advance the schedules
  // Communication: all-reduce of one double over the shard group and one over model_parallel;
  // whole_matrix() for rules that need whole matrices; values_changed() of the stores.
  void step(const at::Tensor& total_weight, int64_t samples);
  void step(double total_weight, int64_t samples);

  // From now on each step also sums the squares of the gradients of parts of the model: a parameter
  // is of the first part with a prefix of its name, or else of the last part.
  using NormParts = std::vector<std::vector<std::string>>;
  void keep_norms_of(const NormParts& prefixes);
  // Of the latest step: [1 + parts] fp64 on the device, all and each part, over all ranks, without
  // the loss scale and weight that StepState::grad_norm is divided by. Undefined: there are none.
  // They travel with the sum of all, in the same all-reduces.
  at::Tensor squared_norms() const;

  // Copies the record to the host; synchronises with the device.
  StepState read_state() const;
  // The record without waiting: [sizeof(StepState)] uint8 on the device, to be copied
  // asynchronously.
  const at::Tensor& state_tensor() const;
  // Whether the stop rule (--max-consecutive-bad-steps) asks to end the run.
  bool must_stop(const StepState& state) const;

  const ParameterSchedule& schedule() const;
  // for a checkpoint's schedule, after resume_schedule()
  void set_schedule(const ParameterSchedule& schedule);
  void load_state(const StepState& state);

  // Every tensor of the state in model order:
  // optimizer.state.{fp32_param,exp_avg,exp_avg_sq,momentum_buffer}.<name>, by the states that the
  // update rule keeps of that parameter. See DistributedDataParallel::state().
  std::vector<StateTensor> tensors() const;
  // Resets master weights to the values (--no-load-optim, --finetune, weights of another run).
  void reload_masters();
  // Call after values were loaded together with tensors(): the optimizer may have host copies of
  // values.
  void reload_values();

  // Statistics for the log, over all ranks; each is collective and synchronises with the device.
  // Gradients are those of the latest step.
  double num_zeros() const;
  double params_norm() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
