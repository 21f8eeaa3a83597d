// For tests of messages.
#pragma once

#include <string>

#include "megatron/base/check.h"

namespace megatron {

// What the Error says that `body` throws; "" when it throws none.
template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace megatron
