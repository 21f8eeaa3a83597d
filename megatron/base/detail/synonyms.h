// What other programs (Hugging Face, torchtitan, llama.cpp) call our flags.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

// Our flags that an unknown one may mean ("--learning_rate", "--optimizer.lr", "-m"), the likeliest
// first. The caller checks whether its command has them.
std::vector<std::string> synonyms_of(std::string_view flag);

}  // namespace megatron
