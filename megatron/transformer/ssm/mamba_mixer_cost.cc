#include "megatron/transformer/ssm/mamba_mixer_cost.h"

#include "megatron/kernels/ssm/ssd_scan_backward.h"
#include "megatron/transformer/ssm/mamba_core.h"
#include "megatron/transformer/ssm/recurrent_cost.h"

namespace megatron {

namespace {

// Of the mixer of one layer on one rank; in bytes.
struct MambaTensors {
  MambaTensors(const TransformerConfig& c, const LayerShape& s)
      : rank(c, s.tensor),
        bc(rank.sharing > 1 ? 2 * s.tokens * rank.state * s.element : 0),
        stats(s.tokens * rank.groups * s.sum),
        state(s.samples * rank.heads * rank.head_size * rank.state * s.sum),
        rows(s.samples * (kMambaConvWidth - 1) * rank.conv_channels() * s.element) {}

  const MambaShape rank;
  int64_t bc, stats;    // gathered B and C; statistics of the norm
  int64_t state, rows;  // before one segment
};

RecurrentTensors tensors_of(const MambaTensors& z, const TransformerConfig& c,
                            const LayerShape& s) {
  const int64_t mixed = s.tokens * z.rank.mixed() * s.element,
                y = s.tokens * z.rank.width() * s.element,
                conv = s.tokens * z.rank.conv_channels() * s.element,
                steps = s.tokens * z.rank.heads * s.sum, chunk_states = z.state / s.sum * s.element;
  // The scan's kernel has chunks of 128 tokens, and beside the states their gradients.
  const bool kernel = s.element == 2 && ssd_scan_backward_supports(z.rank.head_size, z.rank.state);
  const int64_t chunk = kernel ? 128 : c.mamba_chunk_size,
                chunks = (s.tokens / s.samples + chunk - 1) / chunk;
  return {.around = StreamCost(c, s),
          .mixed = mixed,
          .y = y,
          .o_saved = c.recomputes("mamba_norm") ? 0 : y,
          .saved = mixed + y + z.stats + z.bc + (s.context > 1 ? 2 * (z.state + z.rows) : 0),
          .forward_extra = conv + steps + z.bc,
          // The convolution and the gradient of its output; time steps and theirs
          .backward_extra = 2 * (conv + steps) + z.bc + (kernel ? 2 : 1) * chunks * chunk_states};
}

// Per token, forward and backward.
double moved_elements(const TransformerConfig& c, int64_t layer_number) {
  const auto h = static_cast<double>(c.hidden_size), d = static_cast<double>(c.mamba_width(c)),
             bc = 2 * static_cast<double>(c.mamba_states()),
             heads = static_cast<double>(c.mamba_heads(c));
  double elements = kNormElements * h;
  elements += (2 + 2 + 3) * (d + bc);      // convolution: u, y; again; u, dy, du
  elements += 2 * d + bc + heads;          // scan: x, B, C, dt, y
  elements += 3 * d + 2 * bc + 3 * heads;  // its backward, dy and the gradients
  elements += 3 * d + 5 * d;               // gated norm: y, z, o; do, y, z, dy, dz
  const QuantizationOptions options = c.quantization(layer_number);
  if (!options.enabled()) return elements;
  // Casts: Note [Bytes of casts] in layer_cost.h
  if (options.recipe != QuantizationRecipe::kTensorwise) return elements + h + d;
  elements += h + 2 * d;                 // results of both norms
  elements += 2 * (2 * d + bc + heads);  // gradient of in_proj's output
  return elements + 2 * h;               // gradient of the residual stream
}

Traffic group_traffic(const MambaTensors& z, const LayerShape& s) {
  if (z.rank.sharing == 1) return {};
  const auto total = [&](int64_t bytes) {
    return scatter_bytes(z.rank.sharing, static_cast<double>(bytes));
  };
  const double sums = total(z.rank.sharing * z.stats);
  return {total(z.bc) + sums, total(z.bc / s.element * s.sum) + sums};
}

Traffic segment_traffic(const MambaTensors& z, const LayerShape& s) {
  if (s.context == 1) return {};
  const int64_t decay = s.samples * z.rank.heads * s.sum;
  const double bytes =
      scatter_bytes(s.context, static_cast<double>(2 * s.context * (z.state + decay + z.rows)));
  return {bytes, bytes};
}

}  // namespace

SublayerCost mamba_mixer_cost(const TransformerConfig& c, int64_t layer_number,
                              const LayerShape& shape, bool /*offloaded*/) {
  const MambaTensors z(c, shape);
  const bool recompute = c.recomputes("mamba");
  SublayerCost cost = recurrent_cost(c, layer_number, shape, tensors_of(z, c, shape), recompute);
  const int64_t h = c.hidden_size, d = c.mamba_width(c);
  cost.linears = {{"in_proj", 2 * d + 2 * c.mamba_states() + c.mamba_heads(c), h},
                  {"out_proj", h, d}};
  // As Megatron counts the scan: 7 operations for each channel and state.
  cost.score_products = 3.5 * static_cast<double>(d * c.mamba_state_dim);
  cost.moved_elements = moved_elements(c, layer_number);
  cost.tensor += group_traffic(z, shape);
  cost.context = segment_traffic(z, shape);
  const MambaShape& rank = z.rank;
  cost.kept.sequence = RecurrentStateSizes{kMambaConvWidth - 1,
                                           rank.conv_channels(),
                                           rank.heads * rank.head_size * rank.state,
                                           c.mamba_chunk_size,
                                           rank.width() + 2 * rank.states() * rank.sharing,
                                           rank.heads}
                           .bytes(shape);
  if (recompute) {
    cost.recomputed_products = cost.weight_products() + cost.score_products;
    cost.tensor.backward += cost.tensor.forward;
    cost.context.backward += cost.context.forward;
  }
  return cost;
}

}  // namespace megatron
