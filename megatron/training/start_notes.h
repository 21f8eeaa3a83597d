// What a run should know about its configuration before it starts: legal choices that cost much
// more than they seem.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Warnings, each with what to do instead. The arguments must be valid.
std::vector<std::string> start_notes(const Arguments& arguments, int64_t padded_vocab_size,
                                     bool on_gpu);

}  // namespace megatron
