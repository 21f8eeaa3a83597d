// What is wrong with the tensors of a foreign format, all at once.
#pragma once

#include <string>
#include <vector>

namespace megatron {

// Throws Error "<name>: <problem>" with the first ones as details; nothing when there are none.
void throw_problems(const std::string& name, const std::vector<std::string>& problems);

}  // namespace megatron
