// A tree of named parameters. Children and parameters are registered by address in the constructor
// of their owner and live as long as it; modules are neither copied nor moved.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/nn/parameter.h"

namespace megatron {

struct ParallelGroups;

class Module {
 public:
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module() = default;

  // Visits every parameter once, in the order of registration, with its full name; a parameter
  // shared by two modules is visited where it was registered first.
  void visit(const std::function<void(const std::string& name, Parameter& parameter)>& visitor,
             const std::string& prefix = "");

  // All parameters in that order.
  std::vector<Parameter*> parameters();

  // Visits every state tensor that is no parameter (add_state) in the same way.
  void visit_state(const std::function<void(const std::string& name, at::Tensor& state)>& visitor,
                   const std::string& prefix = "");

  // Visits the counts of this module and all below; see step_counts(). The name is the module's.
  void visit_step_counts(
      const std::function<void(const std::string& name, const at::Tensor& counts)>& visitor,
      const std::string& prefix = "");

  // Tells this module and all below that an optimizer step is over; see step_ended().
  void end_step(const at::Tensor& skipped);

  // Writes the full names into the parameters; `prefix` as for visit.
  void name_parameters(const std::string& prefix = "");

  // Elements of all parameters of this rank; without vocabulary padding if the table is not
  // sharded.
  int64_t num_parameters();

 protected:
  void add(std::string name, Parameter* parameter);
  void add(std::string name, Module* child);
  // State that is no parameter, such as the bias of a router: a defined contiguous tensor, equal on
  // all ranks of the stage. The store moves it to the device of the weights and gives it to
  // checkpoints with them, under its full name.
  void add_state(std::string name, at::Tensor* state);
  // What this rank counted in the step, int32, to be summed in place over all ranks of the stage
  // before step_ended(); of tensor ranks that compute the same rows one counts. Undefined: nothing.
  virtual at::Tensor step_counts() { return {}; }
  // Called once on every rank after each optimizer step. `skipped`: [] int64 on the device, 1 if
  // the step changed no weight, else 0.
  virtual void step_ended(const at::Tensor& /*skipped*/) {}

 private:
  std::vector<std::pair<std::string, Parameter*>> parameters_;
  std::vector<std::pair<std::string, at::Tensor*>> states_;
  std::vector<std::pair<std::string, Module*>> children_;
};

// What was counted in a step, summed over the ranks of the stage.
struct StepCounts {
  // The largest count over the mean, [] fp64, of the tensor where that is highest; undefined:
  // nothing is counted
  at::Tensor largest_over_mean;
  std::vector<std::pair<std::string, at::Tensor>> of_modules;  // [n] int32 by name, if asked for
};

// Sums step_counts() of all these modules over the ranks of the stage, and ends their step.
// Communication: one all-reduce over tp and one over dp_cp if something is counted.
StepCounts end_step(const std::vector<Module*>& modules, const at::Tensor& skipped,
                    const ParallelGroups& groups, bool keep_counts = false);

}  // namespace megatron
