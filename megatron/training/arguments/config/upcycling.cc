#include "megatron/training/arguments/config/upcycling.h"

#include "megatron/base/check.h"

namespace megatron {

void UpcyclingConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kRun);
  v.group("checkpointing");
  v.field("moe_use_upcycling", moe_use_upcycling,
          "start from a dense checkpoint, --load or --pretrained-checkpoint: every expert is its "
          "MLP, or a part of it");
  v.field("moe_upcycling_granularity", moe_upcycling_granularity,
          "parts that the dense MLP is cut into, an expert each; its width is that of so many "
          "experts");
}

void UpcyclingConfig::validate(Violations& v) const {
  v.require(moe_upcycling_granularity >= 1,
            cat("--moe-upcycling-granularity ", moe_upcycling_granularity, " must be positive"));
  v.require(moe_use_upcycling || moe_upcycling_granularity == 1,
            "--moe-upcycling-granularity has an effect only with --moe-use-upcycling");
}

}  // namespace megatron
