#include "megatron/transformer/config/batch_invariant.h"

#include "megatron/base/check.h"
#include "megatron/comm/one_shot/peer_collectives.h"
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
  require(c.fp4_format == Fp4Format::kNone, "with FP4 products is not built",
          "leave --fp4-format out");
  require(c.fp8_format == Fp8Format::kNone || c.fp8_recipe == Fp8Recipe::kBlockwise,
          "cannot be used with one FP8 scale for a whole tensor, which depends on all its rows",
          "--fp8-recipe blockwise");
  require(!c.moe_expert_capacity_factor,
          "cannot be used with --moe-expert-capacity-factor: which tokens an expert drops depends "
          "on the others");
  require(!c.has_moe() || !c.uses_sinkhorn(),
          "cannot be used with sinkhorn, which balances the tokens of a batch",
          "--moe-router-load-balancing-type aux_loss");
}

void validate_batch_invariant_on_gpu(const TransformerConfig& c, int64_t tensor_ranks,
                                     Violations& v) {
  const auto require = [&](bool holds, const char* problem) {
    v.require(holds, cat("--batch-invariant-mode ", problem, " is not built for GPUs"),
              "--device cpu");
  };
  require(!c.has_moe(), "with experts");
  require(!c.multi_latent_attention, "with --multi-latent-attention");
  require(!c.is_hybrid(), "with layers that have states");
  require(c.softmax_type == SoftmaxType::kVanilla, "with --softmax-type other than vanilla");
  require(c.kv_channels <= 128 && c.kv_channels % 8 == 0,
          "with heads of more than 128 features, or not a multiple of 8,");
  require(tensor_ranks <= PeerCollectives::kMostRanks,
          "with --tensor-model-parallel-size above 8, whose sums go through NCCL in an order that "
          "depends on their length,");
}

void check_batch_invariant(const TransformerConfig& model, at::Device device, at::ScalarType dtype,
                           int64_t tensor_ranks) {
  Violations violations;
  validate_batch_invariant(model, violations);
  if (device.is_cpu()) {
    violations.require(
        dtype == at::kFloat || dtype == at::kDouble,
        cat("--batch-invariant-mode computes in fp32 or fp64 on a CPU, not in ", toString(dtype)),
        "--dtype fp32");
    violations.require(!model.is_quantized(),
                       "--batch-invariant-mode with FP8 products is built for GPUs alone",
                       "leave --fp8-format out");
  } else {
    violations.require(
        dtype == at::kBFloat16 || dtype == at::kHalf,
        cat("--batch-invariant-mode computes in bf16 or fp16 on a GPU, not in ", toString(dtype)),
        "--dtype bf16, or --device cpu");
    validate_batch_invariant_on_gpu(model, tensor_ranks, violations);
  }
  violations.throw_if_any();
}

}  // namespace megatron
