// Whether a run computes the padding behind the texts of its samples (--remove-padding).
#pragma once

#include <string>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Whether samples of a task are filled up with padding, which columns of theirs mark.
bool pads_samples(std::string_view task);

// Why rows of padding cannot be left out of this run, or "".
std::string why_padding_stays(const Arguments& arguments);

// What the number of rows of a micro-batch without padding is a multiple of; 0: padding is computed
// (BatchMaker).
int64_t unpadded_row_multiple(const Arguments& arguments);

void validate_padding(const Arguments& arguments, Violations& violations);

}  // namespace megatron
