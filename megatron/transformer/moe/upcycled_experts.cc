#include "megatron/transformer/moe/upcycled_experts.h"

#include <cmath>

namespace megatron {
namespace {

double scale_of(const TransformerConfig& t, int64_t granularity) {
  const auto parts = static_cast<double>(granularity), experts = static_cast<double>(t.num_experts),
             chosen = static_cast<double>(t.moe_router_topk);
  const double divided = t.moe_router_pre_softmax ? experts * parts / chosen : parts;
  const bool cubic = is_gated(t.activation()) || t.activation() == Activation::kSquaredRelu;
  return cubic ? std::cbrt(divided) : std::sqrt(divided);
}

}  // namespace

UpcycledExperts upcycled_experts(const TransformerConfig& config, int64_t granularity) {
  return {.width = config.expert_ffn_size(config),
          .gated = is_gated(config.activation()),
          .scale = scale_of(config, granularity),
          .router_seed = config.seed};
}

}  // namespace megatron
