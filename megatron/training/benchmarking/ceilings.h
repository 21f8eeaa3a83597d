// What the machine gives at best: rates of copies, products and attention, and from them the floor
// of a training step: the time that its parts would take alone, each at its ceiling.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"
#include "megatron/training/task.h"

namespace megatron {

// One thing that was timed.
struct Ceiling {
  std::string name;
  double seconds = 0.0;  // of one run
  double flops = 0.0;    // of one run; 0: not counted
  double bytes = 0.0;    // read and written by one run; 0: not counted
  double flop_rate() const { return flops / seconds; }
  double byte_rate() const { return bytes / seconds; }
};

// Seconds of one run of `work`, by the clock around as many as take `least` seconds, after two
// that are not counted. The device is idle before and after.
double seconds_per_run(c10::Device device, double least, const std::function<void()>& work);

// A copy of random numbers within the memory of the device, 1 GiB (CPU: 64 MiB).
Ceiling copy_ceiling(c10::Device device, double least);
// Rates of the machine: a large product in bf16 (CPU: fp32), a copy, attention forward and
// backward, copies from and to page-locked host memory.
std::vector<Ceiling> machine_ceilings(c10::Device device, double least);
// Collectives of 256 MiB over the group, one after the other; `bytes` are those that a ring sends
// from each rank. Collective.
std::vector<Ceiling> collective_ceilings(const ProcessGroup& group, c10::Device device,
                                         double least);

// Each kernel of a layer of the configured model on one micro-batch of random numbers, then those
// of the head and the optimizer.
std::vector<Ceiling> kernel_ceilings(const Arguments& arguments, const Vocabulary& vocabulary,
                                     c10::Device device, double least);

// The floor of one step of one rank without tensor, pipeline or context parallelism. Operands of
// quantised products are in codes already; the bytes that their casts cannot avoid count as memory.
// `updated_parameters`: of the optimizer on this rank. Nothing is counted for data parallelism.
struct StepFloor {
  double gemm_ms = 0.0;       // the step's products in their order and nothing between them
  double attention_ms = 0.0;  // forward and backward, nothing between them
  double memory_ms = 0.0;     // bytes that the other kernels cannot avoid, at the rate of a copy
  double optimizer_ms = 0.0;  // likewise
  double total_ms() const { return gemm_ms + attention_ms + memory_ms + optimizer_ms; }
};
StepFloor step_floor(const Arguments& arguments, const Vocabulary& vocabulary,
                     int64_t num_microbatches, int64_t updated_parameters, c10::Device device,
                     double least);

}  // namespace megatron
