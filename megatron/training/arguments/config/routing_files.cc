#include "megatron/training/arguments/config/routing_files.h"

#include "megatron/base/check.h"

namespace megatron {

void RoutingFilesConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("mixture of experts");
  v.field("moe_enable_routing_replay", moe_enable_routing_replay,
          "needs --moe-routing-record or --moe-routing-replay, which work without it");
  v.field("moe_routing_record", moe_routing_record,
          "folder for the experts that tokens choose, of every iteration");
  v.field("moe_routing_replay", moe_routing_replay,
          "folder of such choices, which are imposed; weights are those of this run's routers");
}

void RoutingFilesConfig::validate(Violations& v) const {
  v.require(
      !moe_enable_routing_replay || !moe_routing_record.empty() || !moe_routing_replay.empty(),
      "--moe-enable-routing-replay has no effect without --moe-routing-record or "
      "--moe-routing-replay");
  v.require(
      moe_routing_record.empty() || moe_routing_record != moe_routing_replay,
      cat("--moe-routing-record and --moe-routing-replay name one folder, ", moe_routing_record));
}

}  // namespace megatron
