#include "megatron/transformer/config/batch_invariant.h"

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

void validate_batch_invariant(const TransformerConfig& c, Violations& v) {
  const auto require = [&](bool holds, const char* problem, const char* hint = "") {
    v.require(holds, cat("--batch-invariant-mode ", problem), hint);
  };
  require(!c.multi_latent_attention || !c.has_adapters(),
          "with adapters beside --multi-latent-attention is not built: decoding merges them into "
          "the weights that make keys and values of latents");
  require(c.position_embedding_type != PositionEmbedding::kRelative,
          "with relative positions is not built");
  require(c.rope_scaling_type != RopeScaling::kLongRope,
          "cannot be used with --rope-scaling-type longrope, whose factors depend on the longest "
          "text of a batch");
  require(!c.is_quantized(), "with FP8 or FP4 products is not built",
          "leave --fp8-format and --fp4-format out");
  require(!c.moe_expert_capacity_factor,
          "cannot be used with --moe-expert-capacity-factor: which tokens an expert drops depends "
          "on the others");
  require(!c.has_moe() || !c.uses_sinkhorn(),
          "cannot be used with sinkhorn, which balances the tokens of a batch",
          "--moe-router-load-balancing-type aux_loss");
}

void check_batch_invariant(const TransformerConfig& model, at::Device device,
                           at::ScalarType dtype) {
  Violations violations;
  validate_batch_invariant(model, violations);
  violations.require(device.is_cpu(), "--batch-invariant-mode is not built for GPUs yet",
                     "--device cpu");
  violations.require(
      dtype == at::kFloat || dtype == at::kDouble,
      cat("--batch-invariant-mode computes in fp32 or fp64 on a CPU, not in ", toString(dtype)),
      "--dtype fp32");
  violations.throw_if_any();
}

}  // namespace megatron
