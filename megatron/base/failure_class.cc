#include "megatron/base/failure_class.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include "megatron/base/exit_codes.h"

namespace megatron {

FailureClass failure_class(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error)) return FailureClass::kUsage;
  if (dynamic_cast<const RetryError*>(&error)) return FailureClass::kRetry;
  if (dynamic_cast<const Error*>(&error)) return FailureClass::kDoNotRetry;
  if (dynamic_cast<const std::logic_error*>(&error)) return FailureClass::kInternal;
  // includes std::filesystem's errors
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  const bool temporary = system && is_temporary(system->code().default_error_condition().value());
  return temporary ? FailureClass::kRetry : FailureClass::kDoNotRetry;
}

int exit_code(FailureClass failure) {
  switch (failure) {
    case FailureClass::kRetry:
      return kExitRetry;
    case FailureClass::kUsage:
      return kExitUsage;
    case FailureClass::kInternal:
      return kExitInternal;
    case FailureClass::kDoNotRetry:
      break;
  }
  return kExitFailure;
}

std::string_view to_string(FailureClass failure) {
  switch (failure) {
    case FailureClass::kRetry:
      return "retry";
    case FailureClass::kUsage:
      return "usage";
    case FailureClass::kInternal:
      return "internal";
    case FailureClass::kDoNotRetry:
      break;
  }
  return "do-not-retry";
}

bool is_temporary(int system_error) {
  switch (system_error) {
    case EIO:
    case ESTALE:
    case ETIMEDOUT:
    case EREMOTEIO:
    case ENOTCONN:
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ENODEV:
    case ENXIO:
    case EAGAIN:
      return true;
    default:
      return false;
  }
}

void throw_system_error(std::string message, int system_error) {
  if (is_temporary(system_error)) throw RetryError(std::move(message));
  throw Error(std::move(message));
}

}  // namespace megatron
