// How tokens reach the ranks of their experts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

enum class TokenDispatcherType { kAllgather, kAlltoall, kFlex };

struct MoEDispatchConfig {
  TokenDispatcherType moe_token_dispatcher_type = TokenDispatcherType::kAllgather;
  std::optional<double> moe_expert_rank_capacity_factor;
  bool moe_shared_expert_overlap = false;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // Flags whose values differ from the defaults.
  std::vector<std::string> given_dispatch_flags() const;
};

}  // namespace megatron
