// Base64 (RFC 4648, the standard alphabet), as token files use it.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

// Reads `text` into bytes; false (and `out` unspecified) for other characters, padding in the
// middle, or a length that no bytes have.
bool parse_base64(std::string_view text, std::string& out);

}  // namespace megatron
