// Versions of libtorch and of the CUDA libraries below it; empty in a build without libtorch (torch_version_none.cc).
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace megatron {

using Versions = std::vector<std::pair<std::string, std::string>>;

Versions torch_versions();

}  // namespace megatron
