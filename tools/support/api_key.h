// The key that a client of the OpenAI API brings.
#pragma once

#include <string>

namespace megatron {

// From a file: its first line that is neither blank nor a comment (#), where a line NAME:KEY of
// `megatron serve --api-key-file` gives its KEY. Without a file: OPENAI_API_KEY, or none. Throws
// Error.
std::string read_api_key(const std::string& path);

}  // namespace megatron
