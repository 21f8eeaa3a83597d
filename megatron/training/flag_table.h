// Every option of Megatron-LM, and what it means here when no field of a configuration owns it: already so, or refused with
// the reason. docs/flags.md is printed from it.
#pragma once

#include <span>
#include <string_view>

#include "megatron/base/parse.h"

namespace megatron {

// The reason of the rows whose flags are fields of a training run's configuration; it is seen where such a flag is given to
// something else. When a feature is built and its flags become fields, their rows get this reason.
inline constexpr std::string_view kOwnedByField = "this command has no such setting";

std::span<const KnownFlag> flag_table();

}  // namespace megatron
