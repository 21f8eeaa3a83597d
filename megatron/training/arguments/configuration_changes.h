// What a resumed run does differently from the one that wrote its checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "megatron/training/arguments/arguments.h"

namespace megatron {

// "--hidden-dropout 0.3, was 0.1" for each flag whose value is not that of the stored configuration
// (config.yaml of a checkpoint), in the order of --help; not for those that say where to start
// from. Empty when there is no such file. Flags that the file does not have keep their defaults.
// Throws Error when it cannot be read.
std::vector<std::string> configuration_changes(const Arguments& arguments,
                                               const std::filesystem::path& stored);

}  // namespace megatron
