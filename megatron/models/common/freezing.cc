#include "megatron/models/common/freezing.h"

#include <algorithm>

#include "megatron/transformer/config/lora.h"

namespace megatron {

void freeze_beside_adapters(Model& model, std::initializer_list<std::string_view> heads) {
  if (!model.config().transformer.has_adapters()) return;
  model.visit([&](const std::string& name, Parameter& parameter) {
    parameter.trainable =
        is_lora_parameter(name) ||
        std::ranges::any_of(heads, [&](std::string_view head) { return name.starts_with(head); });
  });
}

}  // namespace megatron
