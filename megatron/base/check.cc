#include "megatron/base/check.h"

namespace megatron {

void throw_error(std::string message) { throw Error(std::move(message)); }

void fail_invariant(const char* condition, const std::source_location& where, std::string message) {
  throw InternalError(cat("internal error: ", where.file_name(), ":", where.line(), ": ", condition,
                          message.empty() ? "" : ": ", message));
}

}  // namespace megatron
