// Grammars that a server must survive: each is refused, or compiles within the limits.
#pragma once

#include <vector>

#include "megatron/inference/grammar.h"

namespace megatron {

std::vector<GrammarText> hostile_grammars();

}  // namespace megatron
