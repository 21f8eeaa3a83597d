// A checkpoint that cannot be reached, as opposed to one that is damaged.
#pragma once

#include <string>

#include "megatron/base/check.h"

namespace megatron {

// The system refused access (EACCES, EPERM), ran out of a resource (EMFILE, ENFILE, ENOMEM), or a
// disk or file server fails (EIO, ESTALE). It says nothing about the stored bytes, so no other
// checkpoint is used instead. What is thrown is also an Error, or a RetryError if a restart may
// succeed.
class AccessError {
 public:
  virtual ~AccessError() = default;
  virtual const char* what() const noexcept = 0;
};

[[noreturn]] void throw_access_error(const std::string& message, bool may_retry);

// Runs `work` and returns what is damaged, the message of its Error, or "". Access errors pass.
template <class Work>
std::string damage_of(const Work& work) {
  try {
    work();
    return "";
  } catch (const AccessError&) {
    throw;
  } catch (const Error& error) {
    return error.what();
  }
}

// Whether this errno of a file means that the checkpoint is incomplete or is none (ENOENT, ENOTDIR,
// ...). All others are access errors.
bool is_damage(int error);

}  // namespace megatron
