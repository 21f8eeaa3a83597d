// Which processes are on the same machine.
#pragma once

#include <string>

namespace megatron {

// Equal for processes that share a PID namespace.
std::string machine_id();

}  // namespace megatron
