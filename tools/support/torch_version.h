// Versions of libtorch and of its libraries, as loaded. This header does not include libtorch.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace megatron {

using Versions = std::vector<std::pair<std::string, std::string>>;

// Appends {"libtorch", "2.11.0"}, and with CUDA the runtime, cuDNN, cuBLASLt and NCCL. In
// libmegatron_compute.so.
extern "C" void megatron_torch_versions(Versions& all);

}  // namespace megatron
