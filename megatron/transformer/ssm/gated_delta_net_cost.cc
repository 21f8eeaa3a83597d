#include "megatron/transformer/ssm/gated_delta_net_cost.h"

#include <algorithm>

#include "megatron/transformer/ssm/gated_delta_core.h"

namespace megatron {

namespace {

// The sublayer of one layer on one rank; tensors in bytes.
struct DeltaTensors {
  DeltaTensors(const TransformerConfig& c, const LayerShape& s)
      : around(c, s),
        rank(c, s.tensor),
        mixed(s.tokens * rank.mixed() * s.element),
        y(s.tokens * rank.value_width() * s.element),
        conv(s.tokens * rank.conv_channels() * s.element),
        keys(2 * s.tokens * rank.key_width() * s.sum),
        stats(s.tokens * rank.value_heads * s.sum),
        state(s.samples * rank.value_heads * rank.key_size * rank.value_size * s.sum),
        decay(s.samples * rank.value_heads * rank.key_size * rank.key_size * s.sum),
        rows(s.samples * (rank.conv_size - 1) * rank.conv_channels() * s.element),
        chunk_states((s.tokens / s.samples + kDeltaChunk - 1) / kDeltaChunk * state / s.sum *
                     s.element),
        o_saved(c.recomputes("gdn_norm_out") ? 0 : y),
        saved(mixed + y + stats + (s.context > 1 ? 2 * (state + rows) : 0)) {}

  const StreamCost around;
  const GatedDeltaShape rank;
  int64_t mixed, y;      // output of in_proj; of the rule, and of the norm
  int64_t conv;          // output of the convolution
  int64_t keys;          // queries and keys of unit length
  int64_t stats;         // statistics of the norm; as large: decays, and betas
  int64_t state, decay;  // of one segment
  int64_t rows;          // before one segment
  int64_t chunk_states;  // states between chunks
  int64_t o_saved;       // input of out_proj
  int64_t saved;         // by what lies between the linears

  int64_t forward_extra() const { return conv + keys + 2 * stats; }
  void forward(AllocationTrack& track) const {
    around.column_forward(mixed, track);
    track.take(saved - mixed);
    track.touch(forward_extra());
    track.take(o_saved);
    around.row_forward(y - o_saved, track);
  }
  int64_t unrecorded_peak() const {
    return mixed + std::max(around.normed + around.cast + around.gathered,
                            std::max(y + forward_extra(), 2 * y + around.product + around.part));
  }
  void backward(AllocationTrack& track) const {
    around.row_backward(y, o_saved, track);
    track.touch(y - o_saved);  // the norm's output made again
    track.take(mixed);
    // Gradient of y; what the rule reads and its gradients
    track.touch(y + 2 * forward_extra() + chunk_states);
    track.give(y + saved);
    around.column_backward(mixed, track);
  }
};

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
  const StreamCost& around = z.around;
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = around.pre_norm_saved + around.post_norm_saved;
  cost.saved.attention = z.saved + z.o_saved;
  cost.set_peaks([&](AllocationTrack& track) { z.forward(track); },
                 [&](AllocationTrack& track) { z.backward(track); }, z.unrecorded_peak());
  cost.pending = around.pending() + z.mixed + z.y;
  if (!c.quantization(layer_number).enabled()) cost.postponed = z.y;
  const int64_t h = c.hidden_size, v = c.linear_value_width(), qk = 2 * c.linear_key_width(),
                heads = c.linear_num_value_heads;
  cost.linears = {{"in_proj", qk + 2 * v + 2 * heads, h}, {"out_proj", h, v}};
  // As Megatron counts the convolution and the rule.
  cost.score_products =
      static_cast<double>(c.linear_conv_kernel_dim * (qk + v) +
                          4 * heads * c.linear_value_head_dim * c.linear_value_head_dim);
  cost.moved_elements = delta_moved_elements(c, layer_number);
  cost.tensor = around.tensor_traffic(shape);
  if (shape.context > 1) {
    const double bytes = scatter_bytes(
        shape.context, static_cast<double>(2 * shape.context * (z.state + z.decay + z.rows)));
    cost.context = {bytes, bytes};
  }
  cost.kept.sequence = (z.rows + z.state) / shape.samples;
  return cost;
}

}  // namespace megatron
