// What other programs (Hugging Face, torchtitan, llama.cpp) call our flags.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// Our flags that may be meant by an unknown one ("--learning_rate", "--optimizer.lr", "-m"), the
// likeliest first. Whether the command at hand has them is for the caller to say.
std::vector<std::string> synonyms_of(std::string_view flag);

}  // namespace megatron
