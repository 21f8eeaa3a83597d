// Classes of failures, for whoever decides about restarting the program.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {

enum class FailureClass {
  kDoNotRetry,  // a restart would fail again: data, configuration, a full disk
  kRetry,       // the environment: a lost peer, a timeout, a device, a file server
  kUsage,       // the command line
  kInternal,    // a bug of ours
};

// A failure of the environment that a restart may avoid. main() exits with kExitRetry.
class RetryError : public Error {
 public:
  using Error::Error;
};

// kDoNotRetry by default; system errors are classified by errno.
FailureClass failure_class(const std::exception& error);

int exit_code(FailureClass failure);
std::string_view to_string(FailureClass failure);  // "do-not-retry", "retry", "usage", "internal"

// Whether the system error is one of the machine or file server (EIO, ESTALE, ETIMEDOUT, ...), not
// one of the request or of space (ENOENT, EACCES, ENOSPC, ...).
bool is_temporary(int system_error);

// Throws RetryError or Error, depending on `system_error`.
[[noreturn]] void throw_system_error(std::string message, int system_error);

}  // namespace megatron
