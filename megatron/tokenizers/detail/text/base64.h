// Base64 (RFC 4648, the standard alphabet), as token files use it.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

// Decodes `text`; false (and `out` unspecified) for other characters, padding in the middle, or an
// impossible length.
bool parse_base64(std::string_view text, std::string& out);

}  // namespace megatron
