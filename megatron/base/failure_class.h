// What a failure means for whoever decides about starting the program again.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {

enum class FailureClass {
  kDoNotRetry,  // again would fail again: data, configuration, a full disk
  kRetry,       // the environment: a lost peer, a timeout, a device, a file server
  kUsage,       // the command line
  kInternal,    // a bug of ours
};

// A failure of the environment that another start may not meet. main() exits with kExitRetry.
class RetryError : public Error {
 public:
  using Error::Error;
};

// Error and what it is not told apart from are kDoNotRetry; errors of the system go by their errno.
FailureClass failure_class(const std::exception& error);

int exit_code(FailureClass failure);
std::string_view to_string(FailureClass failure);  // "do-not-retry", "retry", "usage", "internal"

// Whether the system's error is one of the machine or the file server (EIO, ESTALE, ETIMEDOUT, ...)
// and not one of what was asked for or of space (ENOENT, EACCES, ENOSPC, ...).
bool is_temporary(int system_error);

// Throws RetryError or Error, as `system_error` says.
[[noreturn]] void throw_system_error(std::string message, int system_error);

}  // namespace megatron
