// Python's str methods, on UTF-8: texts are indexed by code points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace megatron {

int64_t python_length(std::string_view text);
// The byte offset of code point `index`, at most the size.
size_t python_offset(std::string_view text, int64_t index);
void python_append_code_point(uint32_t code, std::string& out);
std::string python_upper_case(std::string_view text);
std::string python_lower_case(std::string_view text);
// The first character in title case, the rest lower.
std::string python_capitalized(std::string_view text);
bool python_is_space(uint32_t code);
// Python's str.strip: white space, or any of the characters of `chars`.
std::string python_stripped(std::string_view text, const std::string* chars = nullptr,
                            bool left = true, bool right = true);

}  // namespace megatron
