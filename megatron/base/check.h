// Errors: one exception type, two macros, messages built from values.
//
// Form of a message (docs/architecture.md): lower case, no final period, says what the user wrote,
// what was found and what was expected; optional further lines start with "detail: " or "hint: ".
#pragma once

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

namespace megatron {

// A problem caused by the user, the data, the disk, a peer or a device. what() is the full message.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An error in flags or configuration. main() exits with 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A bug of ours. what() starts with "internal error: ". main() exits with 3.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Concatenates values as operator<< prints them.
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

[[noreturn]] void throw_error(std::string message);
[[noreturn]] void fail_invariant(const char* condition, const std::source_location& where,
                                 std::string message);

}  // namespace megatron

// For causes outside of the program: throws Error with the concatenated values.
#define MEGATRON_CHECK(cond, ...)                                       \
  do {                                                                  \
    if (!(cond)) ::megatron::throw_error(::megatron::cat(__VA_ARGS__)); \
  } while (0)

// For bugs of ours: throws InternalError with file and line.
#define MEGATRON_ASSERT(cond, ...)                                                \
  do {                                                                            \
    if (!(cond))                                                                  \
      ::megatron::fail_invariant(#cond, std::source_location::current(),          \
                                 ::megatron::cat("" __VA_OPT__(, ) __VA_ARGS__)); \
  } while (0)
