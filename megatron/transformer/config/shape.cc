#include "megatron/transformer/config/shape.h"

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

void ShapeConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kArchitecture);
  v.group("network size");
  v.field("num_layers", num_layers, "number of transformer layers");
  v.field("hidden_size", hidden_size, "width of the residual stream");
  v.field("ffn_hidden_size", ffn_hidden_size,
          "width of the MLP; 0: 4 * hidden_size, or 8/3 of it rounded down to 64 with --swiglu");
  v.field("num_attention_heads", num_attention_heads, "number of query heads");
  v.field("group_query_attention", group_query_attention,
          "share keys and values among groups of heads");
  v.field("num_query_groups", num_query_groups,
          "number of key/value heads with --group-query-attention");
  v.field("kv_channels", kv_channels, "width of one head; 0: hidden_size / num_attention_heads");
  v.role(FieldRole::kNumerics);
  v.field("seq_length", seq_length, "tokens per sample");
  v.role(FieldRole::kArchitecture);
  v.field("max_position_embeddings", max_position_embeddings, "longest position; 0: seq_length");
  v.field("untie_embeddings_and_output_weights", untie_embeddings_and_output_weights,
          "give the output layer its own weight");
}

void ShapeConfig::validate(Violations& v, bool attends) const {
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(
        value > 0,
        value == 0 ? cat(flag, " is required and must be positive") : cat(flag, " is ", value),
        value == 0 ? "" : "1 or more");
  };
  positive("--num-layers", num_layers);
  positive("--hidden-size", hidden_size);
  if (attends) positive("--num-attention-heads", num_attention_heads);
  positive("--seq-length", seq_length);
  if (!is_given(attends)) return;
  v.require(
      num_attention_heads == 0 ||
          (kv_channels > 0 && (kv_channels * num_attention_heads == hidden_size ||
                               hidden_size % num_attention_heads == 0 ||
                               kv_channels != hidden_size / num_attention_heads)),
      cat("--hidden-size ", hidden_size, " is not divisible by --num-attention-heads ",
          num_attention_heads),
      cat("give --kv-channels, or a number of heads that divides: ", format_divisors(hidden_size)));
  v.require(ffn_hidden_size > 0, cat("--ffn-hidden-size ", ffn_hidden_size, " must be positive"));
  if (group_query_attention)
    v.require(num_query_groups > 0 && num_attention_heads % num_query_groups == 0,
              cat("--num-attention-heads ", num_attention_heads,
                  " is not divisible by --num-query-groups ", num_query_groups),
              cat("groups that divide it: ", format_divisors(num_attention_heads)));
  v.require(max_position_embeddings >= seq_length,
            cat("--max-position-embeddings ", max_position_embeddings, " is below --seq-length ",
                seq_length));
}

}  // namespace megatron
