// Traces a few training steps under one layout of ranks as logical tensors, and compares two
// traces: used by `megatron prove` and by the equivalence matrix in the tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "megatron/training/setup.h"

namespace megatron {

// By name, global shape without padding, fp64 on the host
using LogicalTensors = std::map<std::string, at::Tensor>;

// What is compared, in the order in which a difference shows.
enum class Quantity {
  kRouting,       // which experts tokens choose
  kLoss,          // the weight of its tokens, auxiliary losses, the task's metrics
  kGradients,     // of the mean loss, before clipping
  kGradientNorm,  // and the number of zeros
  kClipFactor,
  kSchedule,    // learning rate, decay, counts of steps, loss scale, skipped steps
  kWeights,     // after the last step, and their norm
  kStates,      // of the optimizer, of modules, of delayed scaling, after the last step
  kEvaluation,  // losses and metrics of the validation and test sets
};
inline constexpr int kNumQuantities = 9;
// "routing", "loss", ...
const char* name_of(Quantity quantity);

// A number that every rank has.
struct TracedNumber {
  Quantity quantity = Quantity::kLoss;
  double value = 0;
  bool exact = false;  // no layout may round it differently: counts, learning rates
};

struct TracedStep {
  std::map<std::string, TracedNumber> numbers;
  LogicalTensors grads;
  double number(const std::string& name) const { return numbers.at(name).value; }
};

struct TrainingTrace {
  std::vector<TracedStep> steps;
  LogicalTensors weights, states;
  // With TraceOptions::routers, RouterLog::Rows of all ranks: "layer 2 use 0 sample 17 logits",
  // "... choices", "... bias"; NaN where no rank computed a row.
  LogicalTensors routers;
  std::map<std::string, TracedNumber> evaluation;
  // Problems of the shards themselves: elements that no rank holds, replicas of one element or
  // numbers that differ between ranks.
  std::vector<std::string> faults;
};

struct TraceOptions {
  at::ScalarType dtype = at::kDouble;
  int num_steps = 1;
  // false: every step runs on initial weights of its own, whose seed is its number; such a trace
  // has no updated weights and no numbers of the optimizer.
  bool updates = true;
  // Without updates: weights are rounded to this type first.
  at::ScalarType weights = at::kDouble;
  // Takes the place of accumulate_gradients(); such a trace has no losses and no evaluation.
  std::function<at::Tensor(TrainedModel&, const StepOptions&, int step)> gradients = {};
  const RoutingReplay* routing = nullptr;  // choices of routers to record or impose; null: neither
  bool routers = false;  // with `routing`: also what routers compute and would choose by themselves
  // Of one rank: initial weights are multiplied by 1 + or 1 - this, each element by one of both.
  double disturbance = 0;
};

// Trains from new weights on the data of the arguments (--mock-data: synthetic text), on the CPU,
// with arguments.world_size ranks that are threads of this process.
TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             const TraceOptions& options);

// The same as one rank of a job of processes; the first rank gets the trace, the others an empty
// one.
TrainingTrace trace_training(const PretrainTask& task, const Arguments& arguments,
                             const TraceOptions& options, const Job& job, c10::Device device);

// One comparison.
struct Comparison {
  Quantity quantity = Quantity::kLoss;
  int step = 0;           // counts from 1; 0: after the last one
  std::string name;       // "step 2 gradient of decoder.layers.0...", "step 1 loss", ...
  double difference = 0;  // || a - b ||
  double allowed = 0;
  bool holds() const { return difference <= allowed; }  // false for NaN
};

// Compares everything in the traces.
//
//   || a - b || <= rtol * || b || + 1e-3 * rtol * || all gradients ||
//
// for each gradient; the second term is needed because some gradients (of a key bias) are zero in
// exact arithmetic. Likewise for each updated weight or state, with the norm of all of its kind,
// because weights initialised to zero have changed by such gradients only. For numbers of one kind
// and step rtol is relative to the largest. Exact numbers must be equal. With rtol 0 everything
// must be, infinities too.
std::vector<Comparison> compare_traces(const TrainingTrace& trace, const TrainingTrace& reference,
                                       double rtol);

// A disturbance of weights in fp64 by their rounding.
inline constexpr double kRoundingOfWeights = 0x1p-52;

// A step, 0 for what follows the last one, and the relative band that its rounding needs.
struct GrownRounding {
  int step = 0;
  double band = 0;
};

// For models that amplify rounding, and steps of which nothing else is left. `disturbed` is the run
// of `reference` with weights disturbed by their rounding. The bands of a step in which something
// moves by more than a part of its band become as wide as the rounding of all operations needs: all
// of them, since a single number may happen to move by less. Exact numbers stay equal.
std::vector<GrownRounding> allow_grown_rounding(std::vector<Comparison>& comparisons,
                                                const TrainingTrace& disturbed,
                                                const TrainingTrace& reference, double rtol);

}  // namespace megatron
