#pragma once

#include <string>

namespace megatron {

// The commit that this program was built from, "-dirty" behind it when files differed; empty when
// it was built outside of a repository. In a source of its own: nothing else is compiled again when
// the commit changes.
std::string build_commit();

}  // namespace megatron
