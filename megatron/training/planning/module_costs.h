// What the modules of a model cost a rank that has more than a language model, for the report of
// `megatron check`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct ModuleReport {
  std::string name;
  int64_t parameters = 0, trained = 0;  // of the model, each counted once
  // Of the largest legal micro-batch on the rank that has most of it
  double forward_flops = 0, backward_flops = 0;
  double forward_ms = 0, backward_ms = 0;  // on an H100: work_seconds()
};

// The modules besides the language model, and behind them that; empty: there are none. A frozen
// language model computes the gradients of its inputs alone.
std::vector<ModuleReport> module_reports(const LayoutPlan& plan);

// "vision_model" of ModuleCost::name.
std::string module_name(std::string_view prefix);

}  // namespace megatron
