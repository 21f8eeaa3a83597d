// Peak rates of the machine, measured: copies, GEMMs and attention; and from them a lower bound for
// the time of a training step: each part at its peak rate.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"
#include "megatron/training/task.h"

namespace megatron {

// One measurement.
struct Ceiling {
  std::string name;
  double seconds = 0.0;  // per run
  double flops = 0.0;    // per run; 0: not counted
  double bytes = 0.0;    // read and written by one run; 0: not counted
  double flop_rate() const { return flops / seconds; }
  double byte_rate() const { return bytes / seconds; }
};

// Seconds of one run of `work`: the mean over as many runs as take `least` seconds, after two
// warm-up runs. The device is idle before and after.
double seconds_per_run(c10::Device device, double least, const std::function<void()>& work);

// As seconds_per_run(), of a captured graph on a GPU: kernels that are shorter than the host's work
// for them take as long as they do in a step, which the host is ahead of.
double device_seconds_per_run(c10::Device device, double least, const std::function<void()>& work);

// A device-to-device copy of 1 GiB of random numbers (CPU: 64 MiB).
Ceiling copy_ceiling(c10::Device device, double least);
// Peak rates of the machine: a large GEMM in bf16 (CPU: fp32), a copy, attention forward and
// backward, copies from and to page-locked host memory.
std::vector<Ceiling> machine_ceilings(c10::Device device, double least);
// Collectives of 256 MiB over the group, one after the other; `bytes`: what each rank sends in a
// ring algorithm. Collective.
std::vector<Ceiling> collective_ceilings(const ProcessGroup& group, c10::Device device,
                                         double least);

// Each kernel of a layer of the model on one micro-batch of random numbers, then those of output
// layer and optimizer; of them those whose names contain `only`.
std::vector<Ceiling> kernel_ceilings(const Arguments& arguments, const ModelConfig& model,
                                     const Vocabulary& vocabulary, c10::Device device, double least,
                                     const std::string& only);

// Lower bound for one step of one rank without tensor, pipeline or context parallelism. GEMMs with
// quantised operands are timed without the casts; the bytes that casts must move count as memory.
// Attention is what the model's layers compute, without dropout and masks: causal or not, in
// windows, with a bias by distance, with caps and sinks. Convolutions, scans and norms of
// state-space layers are timed by themselves, too. `batch`: a micro-batch, whose rows without
// padding count where it has some.
// `updated_parameters`: parameters that the optimizer updates on this rank. Communication of data
// parallelism is not counted.
struct StepFloor {
  double gemm_ms = 0.0;       // the step's GEMMs, back to back
  double attention_ms = 0.0;  // forward and backward, back to back
  double states_ms = 0.0;     // kernels of state-space layers, each by itself
  double memory_ms = 0.0;     // bytes that the other kernels must move, at the rate of a copy
  double optimizer_ms = 0.0;  // the same for the optimizer
  double total_ms() const { return gemm_ms + attention_ms + states_ms + memory_ms + optimizer_ms; }
};
StepFloor step_floor(const Arguments& arguments, const ModelConfig& model,
                     const Vocabulary& vocabulary, const Batch& batch, int64_t num_microbatches,
                     int64_t updated_parameters, c10::Device device, double least);

}  // namespace megatron
