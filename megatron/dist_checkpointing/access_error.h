// A checkpoint that cannot be reached, as opposed to one that is damaged.
#pragma once

#include <string>

#include "megatron/base/failure_class.h"

namespace megatron {

// The system refused access (EACCES, EPERM), has run out of something (EMFILE, ENFILE, ENOMEM), or
// a disk or file server fails (EIO, ESTALE). It says nothing about the bytes that were written, so
// nobody takes another checkpoint for it. What is thrown is also an Error, or a RetryError where
// another start may succeed.
class AccessError {
 public:
  virtual ~AccessError() = default;
  virtual const char* what() const noexcept = 0;
};

[[noreturn]] void throw_access_error(const std::string& message, bool may_retry);

// Whether this errno of a file says that a checkpoint is incomplete or is none (ENOENT, ENOTDIR,
// ...). All others are troubles of access.
bool is_damage(int error);

}  // namespace megatron
