// Rules between experts and the layout, the task and the machine.
#pragma once

#include "megatron/training/arguments/arguments.h"

namespace megatron {

void validate_experts(const Arguments& arguments, Violations& violations);

}  // namespace megatron
