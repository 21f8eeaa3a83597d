#include "megatron/transformer/config/moe/moe_dispatch.h"

#include "megatron/base/check.h"
#include "megatron/transformer/config/detail/given_flags.h"

namespace megatron {
namespace {

constexpr std::string_view kDispatchers[] = {"allgather", "alltoall", "flex"};

}  // namespace

void MoEDispatchConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kMachine);
  v.group("mixture of experts");
  v.choice("moe_token_dispatcher_type", moe_token_dispatcher_type, kDispatchers,
           "how tokens reach the ranks of their experts");
  v.field(
      "moe_expert_rank_capacity_factor", moe_expert_rank_capacity_factor,
      "bound the memory of a rank's experts to this multiple of a balanced share; tokens beyond "
      "it are computed in further rounds, none is dropped");
  v.field("moe_shared_expert_overlap", moe_shared_expert_overlap,
          "compute the shared expert while tokens travel to their experts");
}

void MoEDispatchConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(moe_expert_rank_capacity_factor.value_or(1) >= 1,
            cat("--moe-expert-rank-capacity-factor ", moe_expert_rank_capacity_factor.value_or(0),
                " is below 1, a balanced share"));
  v.require(
      !moe_shared_expert_overlap || moe_token_dispatcher_type != TokenDispatcherType::kAllgather,
      "--moe-shared-expert-overlap has an effect only with --moe-token-dispatcher-type "
      "alltoall or flex");
}

std::vector<std::string> MoEDispatchConfig::given_dispatch_flags() const {
  return given_flags(*this);
}

}  // namespace megatron
