#include "megatron/base/fields.h"

#include "megatron/base/format.h"

namespace megatron {

void Violations::add(std::string message, std::string hint) {
  if (!hint.empty()) message += "\nhint: " + hint;
  messages_.push_back(std::move(message));
}

void Violations::throw_if_any() const {
  if (messages_.empty()) return;
  throw UsageError(listed(messages_, {}, "\n"));
}

}  // namespace megatron
