// What one layer of each letter of a hybrid model costs a rank, for the report of `megatron check`.
#pragma once

#include <string>
#include <vector>

#include "megatron/training/planning/layout_plan.h"

namespace megatron {

struct LetterCosts {
  char letter = 0;
  std::string name;
  int64_t layers = 0;      // of the model
  int64_t parameters = 0;  // of one layer, over all ranks that divide it
  // Of one layer, a micro-batch and a rank
  int64_t saved = 0;                       // bytes between forward and backward, its input included
  double sent = 0;                         // bytes, forward and backward
  double forward_ms = 0, backward_ms = 0;  // on an H100: layer_seconds()
};

// In the order in which the letters appear; empty: the model is no hybrid.
std::vector<LetterCosts> letter_costs(const LayoutPlan& plan);

}  // namespace megatron
