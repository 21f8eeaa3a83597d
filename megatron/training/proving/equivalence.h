// Traces a few training steps under one layout of ranks as logical tensors, and compares two
// traces: used by `megatron prove` and by the equivalence matrix in the tests.
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
  double weight = 0;       // total weight of the tokens of the step
  double grad_norm = 0;    // before clipping
  double clip_factor = 1;  // gradients were multiplied by this
  // Losses besides the main one, each per its own weight
  std::map<std::string, double> auxiliary;
  LogicalTensors grads;  // gradients of the mean loss, before clipping
};

struct TrainingTrace {
  std::vector<TracedStep> steps;
  LogicalTensors weights;  // after the last step
  // Problems of the shards themselves: elements that no rank holds, replicas of one element that
  // differ between ranks.
  std::vector<std::string> faults;
};

// Trains `num_steps` steps from new weights on the data of the arguments (--mock-data: synthetic
// text), in `dtype`, on the CPU, with arguments.world_size ranks that are threads of this process.
TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             at::ScalarType dtype, int num_steps);

// The same as one rank of a job of processes; the first rank gets the trace, the others an empty
// one.
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
// for each gradient; the second term is needed because some gradients (of a key bias) are zero in
// exact arithmetic. Likewise for each updated weight, with the norm of all weights, because weights
// initialised to zero have changed by such gradients only.
std::vector<Comparison> compare_traces(const TrainingTrace& trace, const TrainingTrace& reference,
                                       double rtol);

}  // namespace megatron
