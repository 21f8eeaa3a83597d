// Rules between FP8 or FP4 products, the sizes of a model and the layout.
#pragma once

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Quantised products read operands in units of 16 elements, or blocks of 128: what one rank has of
// every dimension must be a multiple of them. The rows of an expert need not be.
void validate_quantization(const Arguments& arguments, Violations& violations);

}  // namespace megatron
