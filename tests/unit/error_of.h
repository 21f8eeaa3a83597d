// For tests of messages.
#pragma once

#include <exception>
#include <string>

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

}  // namespace megatron
