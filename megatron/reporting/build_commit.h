#pragma once

#include <string>

namespace megatron {

// The commit that this program was built from, with the suffix "-dirty" if files differed; empty if
// it was built outside of a repository. In a source file of its own, so that a new commit
// recompiles nothing else.
std::string build_commit();

}  // namespace megatron
