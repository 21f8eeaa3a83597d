#include "megatron/transformer/ssm/gated_delta_net_cost.h"

#include "megatron/kernels/ssm/gated_delta_backward.h"
#include "megatron/transformer/ssm/gated_delta_core.h"
#include "megatron/transformer/ssm/recurrent_cost.h"

namespace megatron {

namespace {

// Of the sublayer of one layer on one rank; in bytes.
struct DeltaTensors {
  DeltaTensors(const TransformerConfig& c, const LayerShape& s)
      : rank(c, s.tensor),
        state(s.samples * rank.value_heads * rank.key_size * rank.value_size * s.sum),
        decay(s.samples * rank.value_heads * rank.key_size * rank.key_size * s.sum),
        rows(s.samples * (rank.conv_size - 1) * rank.conv_channels() * s.element) {}

  const GatedDeltaShape rank;
  int64_t state, decay;  // of one segment
  int64_t rows;          // before one segment
};

// The rule's kernels take bf16 and keep what they leave each other beside.
struct RuleMemory {
  int64_t unit_element;  // of queries and keys of unit length
  int64_t forward, backward;
};
RuleMemory memory_of_rule(const DeltaTensors& z, const TransformerConfig& c, const LayerShape& s) {
  const GatedDeltaShape& r = z.rank;
  const int64_t chunks = (s.tokens / s.samples + c.linear_chunk_size - 1) / c.linear_chunk_size;
  if (s.element != 2 || !gated_delta_supports(r.key_size, r.value_size))
    return {s.sum, 0, chunks * z.state / s.sum * s.element};
  GatedDeltaArgs rule;
  rule.tokens = s.tokens / s.samples;
  rule.samples = s.samples;
  rule.value_heads = r.value_heads;
  rule.key_size = r.key_size;
  rule.value_size = r.value_size;
  return {s.element, gated_delta_workspace(rule), gated_delta_backward_workspace(rule)};
}

RecurrentTensors tensors_of(const DeltaTensors& z, const TransformerConfig& c,
                            const LayerShape& s) {
  const RuleMemory rule = memory_of_rule(z, c, s);
  const int64_t mixed = s.tokens * z.rank.mixed() * s.element,
                y = s.tokens * z.rank.value_width() * s.element,
                conv = s.tokens * z.rank.conv_channels() * s.element,
                unit = 2 * s.tokens * z.rank.key_width() * rule.unit_element,
                // Of the norm; as large: decays, and betas
      stats = s.tokens * z.rank.value_heads * s.sum, operands = conv + unit + 2 * stats;
  return {.around = StreamCost(c, s),
          .mixed = mixed,
          .y = y,
          .o_saved = c.recomputes("gdn_norm_out") ? 0 : y,
          .saved = mixed + y + stats + (s.context > 1 ? 2 * (z.state + z.rows) : 0),
          .forward_extra = operands + rule.forward,
          // What the rule reads and its gradients
          .backward_extra = 2 * operands + rule.backward};
}

// Per token, forward and backward.
double delta_moved_elements(const TransformerConfig& c, int64_t layer_number) {
  const auto h = static_cast<double>(c.hidden_size),
             v = static_cast<double>(c.linear_value_width()),
             qk = 2 * static_cast<double>(c.linear_key_width()),
             heads = 2 * static_cast<double>(c.linear_num_value_heads);
  double elements = kNormElements * h;
  elements += (2 + 2 + 3) * (qk + v);      // convolution: u, y; again; u, dy, du
  elements += qk + 2 * v + heads;          // rule: q, k, v, decay, beta, y
  elements += 2 * qk + 3 * v + 2 * heads;  // its backward, dy and the gradients
  elements += 3 * v + 5 * v;               // norm and gate: y, z, o; do, y, z, dy, dz
  const QuantizationOptions options = c.quantization(layer_number);
  if (!options.enabled()) return elements;
  // Casts: Note [Bytes of casts] in layer_cost.h
  if (options.recipe != QuantizationRecipe::kTensorwise) return elements + h + v;
  elements += h + 2 * v;                 // results of both norms
  elements += 2 * (qk + 2 * v + heads);  // gradient of in_proj's output
  return elements + 2 * h;               // gradient of the residual stream
}

}  // namespace

SublayerCost gated_delta_net_cost(const TransformerConfig& c, int64_t layer_number,
                                  const LayerShape& shape, bool /*offloaded*/) {
  const DeltaTensors z(c, shape);
  SublayerCost cost = recurrent_cost(c, layer_number, shape, tensors_of(z, c, shape),
                                     /*recompute=*/false);
  const int64_t h = c.hidden_size, v = c.linear_value_width(), qk = 2 * c.linear_key_width(),
                heads = c.linear_num_value_heads;
  cost.linears = {{"in_proj", qk + 2 * v + 2 * heads, h}, {"out_proj", h, v}};
  // As Megatron counts the convolution and the rule.
  cost.score_products =
      static_cast<double>(c.linear_conv_kernel_dim * (qk + v) +
                          4 * heads * c.linear_value_head_dim * c.linear_value_head_dim);
  cost.moved_elements = delta_moved_elements(c, layer_number);
  if (shape.context > 1) {
    const double bytes = scatter_bytes(
        shape.context, static_cast<double>(2 * shape.context * (z.state + z.decay + z.rows)));
    cost.context = {bytes, bytes};
  }
  const GatedDeltaShape& rank = z.rank;
  cost.kept.sequence = RecurrentStateSizes{rank.conv_size - 1,
                                           rank.conv_channels(),
                                           rank.value_heads * rank.key_size * rank.value_size,
                                           c.linear_chunk_size,
                                           rank.conv_channels(),
                                           2 * rank.value_heads}
                           .bytes(shape);
  return cost;
}

}  // namespace megatron
