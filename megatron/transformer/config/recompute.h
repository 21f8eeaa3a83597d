// Which activations are recomputed in the backward in place of being saved.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/config/shape.h"

namespace megatron {

enum class RecomputeGranularity { kNone, kFull, kSelective };
enum class RecomputeMethod { kUniform, kBlock };

struct RecomputeConfig {
  RecomputeGranularity recompute_granularity = RecomputeGranularity::kNone;
  RecomputeMethod recompute_method = RecomputeMethod::kUniform;
  int64_t recompute_num_layers = 1;
  // core_attn, layernorm, mlp, mlp_act, moe, moe_act, shared_experts, mla_up_proj, mamba,
  // mamba_norm; empty with selective: core_attn.
  // Megatron has no mlp_act; it does for the MLP what moe_act does for experts.
  std::vector<std::string> recompute_modules;
  bool recompute_activations = false;  // old spelling of --recompute-granularity selective
  bool moe_layer_recompute = false;    // old spelling of selective with moe
  // Each tensor-parallel rank keeps 1/t of the saved inputs of recomputed layers.
  bool distribute_saved_activations = false;

  void fields(FieldVisitor& visitor);
  void validate(Violations& v, const ShapeConfig& shape) const;

  // Replaces the aliases, and fills recompute_modules.
  void finalize();
  // Whether selective recomputation includes this one of recompute_modules.
  bool recomputes(std::string_view module) const;
};

}  // namespace megatron
