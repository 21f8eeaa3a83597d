// For tests of messages.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace megatron {

// What the exception says that `body` throws; "" when it throws none.
template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Whether a text shows an address of this process, which tells a client where its memory lies: 0x
// with more digits than a number of 32 bits.
inline bool holds_address(std::string_view text) {
  for (size_t at = 0; (at = text.find("0x", at)) != std::string_view::npos; at += 2)
    if (text.substr(at + 2, 9).size() == 9 &&
        text.substr(at + 2, 9).find_first_not_of("0123456789abcdefABCDEF") ==
            std::string_view::npos)
      return true;
  return false;
}

}  // namespace megatron
