// Names with braces, as shells and Python's braceexpand expand them.
#pragma once

#include <string>
#include <vector>

namespace megatron {

// "a_{00..02}.tar" -> a_00.tar, a_01.tar, a_02.tar; "{a,b}" -> a, b. Of one range or list without a
// comma the text itself. Throws Error if there are too many.
std::vector<std::string> expanded_braces(const std::string& text);

}  // namespace megatron
