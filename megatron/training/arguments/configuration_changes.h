// Flags of a resumed run that differ from those of the run that wrote its checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// "--hidden-dropout 0.3, was 0.1" for each flag whose value differs from the stored configuration
// (config.yaml of a checkpoint), in the order of --help, except flags that say where to start from.
// Flags that are not in the file count as defaults. Empty if there is no such file. Throws Error if
// it cannot be read.
std::vector<std::string> configuration_changes(const Arguments& arguments,
                                               const std::filesystem::path& stored);

}  // namespace megatron
