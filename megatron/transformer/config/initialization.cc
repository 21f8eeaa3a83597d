#include "megatron/transformer/config/initialization.h"

#include "megatron/base/check.h"

namespace megatron {

void InitializationConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("RNG and initialization");
  v.field("init_method_std", init_method_std, "standard deviation of weights");
  v.field("embedding_init_method_std", embedding_init_method_std,
          "standard deviation of embeddings");
  v.field("init_method_xavier_uniform", init_method_xavier_uniform, "Xavier-uniform weights");
  v.field("seed", seed, "seed of weights, dropout and data order");
}

void InitializationConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(init_method_std > 0, cat("--init-method-std ", init_method_std, " must be positive"));
  v.require(!embedding_init_method_std || *embedding_init_method_std > 0,
            cat("--embedding-init-method-std ", embedding_init_method_std.value_or(0),
                " must be positive"));
  v.require(seed > 0, cat("--seed ", seed, " must be positive"));
}

}  // namespace megatron
