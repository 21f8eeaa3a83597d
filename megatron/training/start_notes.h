// Warnings about a configuration before a run starts: valid choices that are unexpectedly slow or
// large.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/training/arguments/model_provider.h"

namespace megatron {

// Warnings, each with an alternative. The arguments must be valid.
std::vector<std::string> start_notes(const Arguments& arguments, const Vocabulary& vocabulary,
                                     bool on_gpu, const ModelProvider& provider = provide_model());

}  // namespace megatron
