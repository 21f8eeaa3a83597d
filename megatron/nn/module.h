// A tree of named parameters. Children and parameters are registered by address in the constructor
// of their owner and live as long as it; modules are neither copied nor moved.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "megatron/nn/parameter.h"

namespace megatron {

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

  // Writes the full names into the parameters; `prefix` as for visit.
  void name_parameters(const std::string& prefix = "");

  // Elements of all parameters of this rank; without vocabulary padding if the table is not
  // sharded.
  int64_t num_parameters();

 protected:
  void add(std::string name, Parameter* parameter);
  void add(std::string name, Module* child);

 private:
  std::vector<std::pair<std::string, Parameter*>> parameters_;
  std::vector<std::pair<std::string, Module*>> children_;
};

}  // namespace megatron
