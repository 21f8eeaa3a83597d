#include "megatron/transformer/attention/cross_attention_cost.h"

#include <algorithm>

#include "megatron/transformer/attention/core_attention_cost.h"

namespace megatron {
namespace {

CoreAttentionSizes cross_sizes(const TransformerConfig& c, const LayerShape& s) {
  CoreAttentionSizes sizes;
  sizes.heads = sizes.groups = c.num_attention_heads / s.tensor;
  sizes.key = sizes.value = c.kv_channels;
  sizes.others = s.encoded * s.context;
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
        kv(k + v),
        own_kv(kv / s.context),
        codes(c.quantization(layer).enabled() && c.fp8_wgrad && !s.sequence_parallel
                  ? s.encoded * c.hidden_size
                  : 0) {}

  const StreamCost around;
  const int64_t norm;     // output of the norm, also in the model's type, and its statistics
  const int64_t encoded;  // the encoder's output, gathered
  const int64_t kv;       // of all context ranks
  const int64_t own_kv;   // what linear_kv makes of this rank's part
  const int64_t codes;    // the encoder's output, quantised for the weight gradient of linear_kv

  int64_t others() const { return shape.context - 1; }
  int64_t gathered_encoded() const { return shape.sequence_parallel ? encoded : 0; }
  int64_t kept() const { return q + kv + codes + CoreAttentionCost::saved(); }

  OffloadedBytes offloaded() const {
    OffloadedBytes out;
    offload(config, "attn_norm", &SavedBytes::residual, around.stream, shape.residual, 1, out);
    offload(config, "qkv_linear", &SavedBytes::norms, norm - around.stats, shape.element, 1, out);
    offload(config, "qkv_linear", &SavedBytes::norms, around.stats, shape.sum,
            config.normalization == Normalization::kLayerNorm ? 2 : 1, out);
    offload(config, "core_attn", &SavedBytes::attention, q, shape.element, 1, out);
    offload(config, "core_attn", &SavedBytes::attention, kv, shape.element, 2, out);
    if (saves_library())
      offload(config, "attn_proj", &SavedBytes::attention, lse, shape.sum, 1, out);
    offload(config, "attn_proj", &SavedBytes::attention, this->out, shape.element, 1, out);
    return out;
  }

  void forward(AllocationTrack& track) const {
    track.take(norm);
    track.take(around.gathered + q);
    track.give(around.gathered);
    track.take(gathered_encoded() + own_kv + codes);
    track.give(gathered_encoded());
    if (others() > 0) {
      track.take(kv);
      track.touch(kv);  // in the order of ranks
      track.give(own_kv);
    }
    track.take(out);
    track.touch(forward_extra());
    around.row_forward(0, track);
  }

  void backward(AllocationTrack& track) const {
    around.row_backward(out, 0, track);
    track.take(q + kv);  // their gradients
    track.touch(std::max(backward_extra(), kv));
    track.give(out + kept());
    if (others() > 0) {
      track.touch((kv + own_kv) * wide + (wide > 1 ? kv * wide : 0));  // summed in fp32
      track.take(own_kv);
      track.give(kv);
    }
    // The gradient of the encoder's output, whole and as this rank's rows
    track.touch(encoded + (shape.sequence_parallel ? encoded / shape.tensor : 0) +
                gathered_encoded());
    track.give(own_kv);
    around.column_backward(q, track);
    if (around.pre_norm_saved < norm) track.give(norm - around.pre_norm_saved);
  }
};

// Per token of the decoder, forward and backward; `rows` of the encoder for each.
double cross_moved_elements(const TransformerConfig& c, int64_t layer_number, double rows) {
  const auto h = static_cast<double>(c.hidden_size), a = static_cast<double>(c.attention_width());
  double elements = kNormElements * h;
  if (c.add_bias_linear) elements += a + 2 * rows * a + h;
  const QuantizationOptions options = c.quantization(layer_number);
  if (!options.enabled()) return elements;
  // Casts: Note [Bytes of casts] in layer_cost.h. The encoder's output is quantised by each layer.
  elements += rows * h;
  if (options.recipe != QuantizationRecipe::kTensorwise) return elements + a + h;
  elements += h + rows * h;          // result of the norm: x again; the encoder's output
  elements += 2 * a;                 // output of attention: read, write quantised
  elements += 2 * a + 4 * rows * a;  // gradients of queries; of keys and values
  return elements + 2 * h;           // gradient of the residual stream
}

}  // namespace

SublayerCost cross_attention_cost(const TransformerConfig& config, int64_t layer_number,
                                  const LayerShape& shape, bool offloaded) {
  const Cross cross(config, layer_number, shape);
  const StreamCost& around = cross.around;
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = cross.norm;
  cost.saved.attention = cross.kept();
  if (offloaded) cost.offloaded = cross.offloaded();
  cost.set_peaks([&](AllocationTrack& track) { cross.forward(track); },
                 [&](AllocationTrack& track) { cross.backward(track); },
                 cross.norm + cross.q + cross.kv + cross.out +
                     std::max(cross.forward_extra(), around.product + around.part));
  cost.pending = around.pending() + cross.q + cross.own_kv + cross.out;
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
  cost.moved_elements = cross_moved_elements(config, layer_number, rows);
  cost.tensor = around.tensor_traffic(shape);
  const double one_way = scatter_bytes(shape.tensor, static_cast<double>(cross.encoded));
  cost.tensor += {shape.sequence_parallel ? one_way : 0, 2 * one_way};
  const auto sent = static_cast<double>(cross.others() * cross.own_kv);
  cost.context = {sent, sent * static_cast<double>(cross.wide)};
  return cost;
}

}  // namespace megatron
