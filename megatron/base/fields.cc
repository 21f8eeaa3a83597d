#include "megatron/base/fields.h"

#include "megatron/base/check.h"

namespace megatron {

void Violations::add(std::string message, std::string hint) {
  if (!hint.empty()) message += "\nhint: " + hint;
  messages_.push_back(std::move(message));
}

void Violations::throw_if_any() const {
  if (messages_.empty()) return;
  std::string all;
  for (const std::string& message : messages_) {
    if (!all.empty()) all += '\n';
    all += message;
  }
  throw UsageError(all);
}

}  // namespace megatron
