// A few steps of training under one layout of ranks, kept as logical tensors, and the comparison of
// two of them: the ground of `megatron prove` and of the equivalence matrix in the tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "megatron/training/setup.h"

namespace megatron {

// By parameter, global shape without padding, fp64 on the host
using LogicalTensors = std::map<std::string, at::Tensor>;

struct TracedStep {
  double loss = 0;         // per weighted token
  double weight = 0;       // of the tokens of the step
  double grad_norm = 0;    // before clipping
  double clip_factor = 1;  // what the gradients were multiplied with
  LogicalTensors grads;    // of the mean loss, before clipping
};

struct TrainingTrace {
  std::vector<TracedStep> steps;
  LogicalTensors weights;  // after the last step
  // What is wrong with the pieces themselves: elements that no rank holds, copies of one element
  // that differ between ranks.
  std::vector<std::string> faults;
};

// Trains `num_steps` steps from new weights on the data that the arguments name (--mock-data for
// made-up text), in `dtype`, as arguments.world_size ranks that are threads of this process, on the
// CPU.
TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             at::ScalarType dtype, int num_steps);

// The same as one rank of a job of processes; the trace is complete on the first rank and empty on
// the others.
TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             at::ScalarType dtype, int num_steps, const Job& job,
                             c10::Device device);

// One compared quantity.
struct Comparison {
  std::string name;       // "step 2 gradient of decoder.layers.0...", "loss", ...
  double difference = 0;  // || a - b ||
  double allowed = 0;
  bool holds() const { return difference <= allowed; }  // false for NaN
};

// Compares everything: losses, gradient norms, clip factors, every gradient of every step, every
// updated weight.
//
//   || a - b || <= rtol * || b || + 1e-3 * rtol * || all gradients ||
//
// for each gradient, since some gradients (that of a key bias) are zero in exact arithmetic, and
// likewise for each updated weight among all weights, since what started from zero has moved by
// such gradients alone.
std::vector<Comparison> compare_traces(const TrainingTrace& trace, const TrainingTrace& reference,
                                       double rtol);

}  // namespace megatron
