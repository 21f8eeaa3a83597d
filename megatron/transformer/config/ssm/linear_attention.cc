#include "megatron/transformer/config/ssm/linear_attention.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/transformer/config/detail/given_flags.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {
namespace {

void validate_heads(const TransformerConfig& c, Violations& v) {
  if (!c.has_letter('G')) {
    refuse_without_letter(kGatedDeltaLetter, given_flags<LinearAttentionConfig>(c), v);
    if (c.recomputes("gdn_norm_out"))
      refuse_without_letter(kGatedDeltaLetter, {"--recompute-modules gdn_norm_out"}, v);
    return;
  }
  if (c.linear_num_key_heads <= 0) return;  // reported already
  v.require(c.linear_num_value_heads % c.linear_num_key_heads == 0,
            cat("--linear-num-value-heads ", c.linear_num_value_heads,
                " is not divisible by --linear-num-key-heads ", c.linear_num_key_heads),
            cat("numbers that divide it: ", format_divisors(c.linear_num_value_heads)));
}

void validate_heads_of_ranks(const TransformerConfig& c, int64_t t, Violations& v) {
  if (t <= 1 || c.linear_num_key_heads <= 0) return;
  // Heads of values are a multiple of these.
  v.require(c.linear_num_key_heads % t == 0,
            cat("--linear-num-key-heads ", c.linear_num_key_heads,
                " is not divisible by --tensor-model-parallel-size ", t),
            cat("sizes that divide it: ", format_divisors(c.linear_num_key_heads)));
}

}  // namespace

constinit const LetterType kGatedDeltaLetter{.letter = 'G',
                                             .name = "gated delta net",
                                             .validate = validate_heads,
                                             .validate_ranks = validate_heads_of_ranks,
                                             .shrink = shrink_gated_delta};

void LinearAttentionConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("state-space layers");
  v.field("linear_num_key_heads", linear_num_key_heads,
          "gated delta nets: heads of queries and keys");
  v.field("linear_num_value_heads", linear_num_value_heads, "gated delta nets: heads of values");
  v.field("linear_key_head_dim", linear_key_head_dim,
          "gated delta nets: width of a head of queries or keys");
  v.field("linear_value_head_dim", linear_value_head_dim,
          "gated delta nets: width of a head of values");
  v.field("linear_conv_kernel_dim", linear_conv_kernel_dim,
          "gated delta nets: tokens that the convolution reads");
  v.role(FieldRole::kNumerics);
  v.field("linear_chunk_size", linear_chunk_size,
          "gated delta nets: tokens whose writes are solved for together");
}

void LinearAttentionConfig::validate(Violations& v, const ShapeConfig&) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " ", value, " must be positive"));
  };
  positive("--linear-num-key-heads", linear_num_key_heads);
  positive("--linear-num-value-heads", linear_num_value_heads);
  positive("--linear-key-head-dim", linear_key_head_dim);
  positive("--linear-value-head-dim", linear_value_head_dim);
  positive("--linear-chunk-size", linear_chunk_size);
  v.require(linear_conv_kernel_dim > 1,
            cat("--linear-conv-kernel-dim ", linear_conv_kernel_dim, " must be at least 2"));
}

}  // namespace megatron
