// Which processes are on the same machine.
#pragma once

#include <string>

namespace megatron {

// Equal for processes that can see one another's process ids.
std::string machine_id();

}  // namespace megatron
