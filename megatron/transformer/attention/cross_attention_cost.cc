#include "megatron/transformer/attention/cross_attention_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/core_attention_cost.h"

namespace megatron {
namespace {

CoreAttentionSizes cross_sizes(const TransformerConfig& c, const LayerShape& s) {
  CoreAttentionSizes sizes;
  sizes.heads = sizes.groups = c.num_attention_heads / s.tensor;
  sizes.key = sizes.value = c.kv_channels;
  sizes.others = s.encoded;
  return sizes;
}

// The cross attention of one layer on one rank; tensors in bytes.
struct Cross : CoreAttentionCost {
  Cross(const TransformerConfig& c, int64_t layer, const LayerShape& s)
      : CoreAttentionCost(c, layer, s, cross_sizes(c, s)),
        around(c, s),
        norm(s.rows * c.hidden_size * (s.residual + (s.residual == s.element ? 0 : s.element)) +
             around.stats),
        encoded(s.encoded * c.hidden_size * s.element),
        kv(k + v) {}

  const StreamCost around;
  const int64_t norm;     // output of the norm, also in the model's type, and its statistics
  const int64_t encoded;  // the encoder's output, gathered
  const int64_t kv;

  int64_t gathered_encoded() const { return shape.sequence_parallel ? encoded : 0; }
  int64_t kept() const { return q + kv + CoreAttentionCost::saved(); }

  void forward(AllocationTrack& track) const {
    track.take(norm);
    track.take(around.gathered + q);
    track.give(around.gathered);
    track.take(gathered_encoded() + kv);
    track.give(gathered_encoded());
    track.take(out);
    track.touch(forward_extra());
    around.row_forward(0, track);
  }

  void backward(AllocationTrack& track) const {
    around.row_backward(out, 0, track);
    track.take(q + kv);  // their gradients
    track.touch(std::max(backward_extra(), kv));
    track.give(out + kept());
    // The gradient of the encoder's output, whole and as this rank's rows
    track.touch(encoded + (shape.sequence_parallel ? encoded / shape.tensor : 0) +
                gathered_encoded());
    track.give(kv);
    around.column_backward(q, track);
    if (around.pre_norm_saved < norm) track.give(norm - around.pre_norm_saved);
  }
};

}  // namespace

SublayerCost cross_attention_cost(const TransformerConfig& config, int64_t layer_number,
                                  const LayerShape& shape) {
  const Cross cross(config, layer_number, shape);
  const StreamCost& around = cross.around;
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = cross.norm;
  cost.saved.attention = cross.kept();
  cost.set_peaks([&](AllocationTrack& track) { cross.forward(track); },
                 [&](AllocationTrack& track) { cross.backward(track); },
                 cross.norm + cross.q + cross.kv + cross.out +
                     std::max(cross.forward_extra(), around.product + around.part));
  cost.pending = around.pending() + cross.q + cross.kv + cross.out;
  cost.deferred_peak = cross.kept() + cross.q + cross.kv + around.stream + cross.backward_extra();
  const int64_t h = config.hidden_size, width = config.attention_width();
  const double rows =
      static_cast<double>(shape.encoded) / static_cast<double>(std::max<int64_t>(1, shape.tokens));
  cost.linears = {{"cross_attention.linear_q", width, h},
                  {"cross_attention.linear_kv", 2 * width, h},
                  {"cross_attention.linear_proj", h, width}};
  cost.linears[1].share = rows;
  cost.linears[1].of_encoded = true;
  cost.attentions = {cross.attention(layer_number)};
  cost.score_products = cross.score_products();
  if (config.recomputes("core_attn")) cost.recomputed_products = cost.score_products;
  const auto a = static_cast<double>(width);
  cost.moved_elements = kNormElements * static_cast<double>(h) +
                        (config.add_bias_linear ? a + 2 * rows * a + static_cast<double>(h) : 0);
  cost.tensor = around.tensor_traffic(shape);
  const double one_way = scatter_bytes(shape.tensor, static_cast<double>(cross.encoded));
  cost.tensor += {shape.sequence_parallel ? one_way : 0, 2 * one_way};
  return cost;
}

}  // namespace megatron
