#include "megatron/nn/module.h"

#include <unordered_set>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

}  // namespace

void Module::add(std::string name, Parameter* parameter) {
  MEGATRON_ASSERT(parameter != nullptr, name);
  parameters_.emplace_back(std::move(name), parameter);
}

void Module::add(std::string name, Module* child) {
  MEGATRON_ASSERT(child != nullptr && child != this, name);
  children_.emplace_back(std::move(name), child);
}

void Module::visit(const std::function<void(const std::string&, Parameter&)>& visitor,
                   const std::string& prefix) {
  std::unordered_set<const Parameter*> seen;
  const std::function<void(Module&, const std::string&)> walk = [&](Module& module,
                                                                    const std::string& path) {
    for (auto& [name, parameter] : module.parameters_)
      if (seen.insert(parameter).second) visitor(join(path, name), *parameter);
    for (auto& [name, child] : module.children_) walk(*child, join(path, name));
  };
  walk(*this, prefix);
}

void Module::add_state(std::string name, at::Tensor* state) {
  MEGATRON_ASSERT(state != nullptr && state->defined() && state->is_contiguous(), name);
  states_.emplace_back(std::move(name), state);
}

void Module::visit_state(const std::function<void(const std::string&, at::Tensor&)>& visitor,
                         const std::string& prefix) {
  for (auto& [name, state] : states_) visitor(join(prefix, name), *state);
  for (auto& [name, child] : children_) child->visit_state(visitor, join(prefix, name));
}

void Module::visit_step_counts(
    const std::function<void(const std::string&, const at::Tensor&)>& visitor,
    const std::string& prefix) {
  if (const at::Tensor counts = step_counts(); counts.defined()) visitor(prefix, counts);
  for (auto& [name, child] : children_) child->visit_step_counts(visitor, join(prefix, name));
}

void Module::end_step(const at::Tensor& skipped) {
  step_ended(skipped);
  for (auto& [name, child] : children_) child->end_step(skipped);
}

std::vector<Parameter*> Module::parameters() {
  std::vector<Parameter*> all;
  visit([&](const std::string&, Parameter& parameter) { all.push_back(&parameter); });
  return all;
}

void Module::name_parameters(const std::string& prefix) {
  visit([](const std::string& name, Parameter& parameter) { parameter.name = name; }, prefix);
}

int64_t Module::num_parameters() {
  int64_t total = 0;
  visit([&](const std::string&, Parameter& parameter) {
    int64_t elements = 1;
    for (int64_t size : parameter.local_shape) elements *= size;
    if (parameter.valid_rows >= 0 && parameter.local_shape == parameter.global_shape)
      elements = elements / parameter.global_shape[0] * parameter.valid_rows;
    total += elements;
  });
  return total;
}

namespace {

// The largest of equal shares is 1; that of nothing, too.
at::Tensor largest_over_mean(const std::vector<at::Tensor>& counts) {
  std::vector<at::Tensor> ratios;
  for (const at::Tensor& one : counts) {
    const at::Tensor mean = one.to(at::kDouble).mean();
    ratios.push_back(at::where(mean > 0, one.max() / mean, 1));
  }
  return at::stack(ratios).max();
}

}  // namespace

StepCounts end_step(const std::vector<Module*>& modules, const at::Tensor& skipped,
                    const ParallelGroups& groups, bool keep_counts) {
  std::vector<at::Tensor> counts;
  std::vector<std::string> names;
  for (Module* module : modules)
    module->visit_step_counts([&](const std::string& name, const at::Tensor& one) {
      MEGATRON_ASSERT(one.scalar_type() == at::kInt && one.is_contiguous());
      counts.push_back(one.view({-1}));
      names.push_back(name);
    });
  if (!counts.empty() && groups.tp.size() * groups.dp_cp.size() > 1) {
    const at::Tensor sums = at::cat(counts);
    groups.tp.all_reduce(sums)->wait();
    groups.dp_cp.all_reduce(sums)->wait();
    int64_t begin = 0;
    for (const at::Tensor& one : counts) {
      one.copy_(sums.narrow(0, begin, one.numel()));
      begin += one.numel();
    }
  }
  StepCounts result;
  if (!counts.empty()) result.largest_over_mean = largest_over_mean(counts);
  for (size_t i = 0; keep_counts && i < counts.size(); ++i)
    result.of_modules.emplace_back(names[i], counts[i].clone());
  for (Module* module : modules) module->end_step(skipped);
  return result;
}

}  // namespace megatron
