#include "megatron/transformer/config/output.h"

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kFusions[] = {"native", "te", "linear"};

}  // namespace

void OutputConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.list_after("attn_logit_softcapping");
  v.field("final_logit_softcapping", final_logit_softcapping,
          "bound the model's logits smoothly: c tanh(logit / c); 0: not");
  v.field("logits_scaling", logits_scaling, "divide the model's logits by this number (Granite)");
  v.role(FieldRole::kNumerics);
  v.group("network behavior");
  v.field("z_loss_coeff", z_loss_coeff,
          "weight of the squared log-partition added to each token's loss");
  v.role(FieldRole::kMachine);
  v.group("attention and recomputation");
  v.choice("cross_entropy_fusion_impl", cross_entropy_fusion_impl, kFusions,
           "linear: the output projection and the loss take some tokens at a time, and logits of a "
           "micro-batch never exist");
  v.field("cross_entropy_chunk_tokens", cross_entropy_chunk_tokens,
          "tokens at a time with --cross-entropy-fusion-impl linear; 0: as many as have 1 GiB of "
          "logits");
}

void OutputConfig::validate(Violations& v, const ShapeConfig&) const {
  v.require(final_logit_softcapping >= 0,
            cat("--final-logit-softcapping ", final_logit_softcapping, " is negative"), "0: none");
  v.require(logits_scaling > 0, cat("--logits-scaling ", logits_scaling, " must be positive"),
            "1: not divided");
  v.require(cross_entropy_chunk_tokens >= 0,
            cat("--cross-entropy-chunk-tokens ", cross_entropy_chunk_tokens, " is negative"));
  v.require(
      cross_entropy_fusion_impl != CrossEntropyFusion::kLinear || final_logit_softcapping == 0.0,
      "--cross-entropy-fusion-impl linear with --final-logit-softcapping is not built");
  v.require(z_loss_coeff >= 0, cat("--z-loss-coeff ", z_loss_coeff, " is negative"));
}

}  // namespace megatron
