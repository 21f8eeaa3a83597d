#include "megatron/transformer/feed_forward/mlp_cost.h"

#include <algorithm>

#include "megatron/transformer/feed_forward/mlp.h"

namespace megatron {

namespace {

// The MLP of one layer on one rank; tensors in bytes.
struct MlpTensors {
  MlpTensors(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape)
      : around(c, shape),
        act(shape.tokens * c.ffn_hidden_size / shape.tensor * shape.element),
        fc1(shape.tokens * c.ffn_hidden_size / shape.tensor * (is_gated(c.activation()) ? 2 : 1) *
            shape.element),
        act_saved(c.recomputes("mlp_act") ? 0 : act),
        gelu_in_product(is_gelu_in_product(c, layer_number)) {}

  const StreamCost around;
  int64_t act, fc1;   // outputs of the activation and of linear_fc1
  int64_t act_saved;  // input of linear_fc2
  bool gelu_in_product;

  void forward(AllocationTrack& track) const {
    around.column_forward(fc1, track);
    track.take(act_saved);
    around.row_forward(act - act_saved, track);
  }
  int64_t unrecorded_peak() const {
    return std::max(fc1 + std::max(around.normed + around.cast + around.gathered, act),
                    act + around.product + around.part);
  }
  void backward(AllocationTrack& track) const {
    around.row_backward(act, act_saved, track);
    track.touch(act - act_saved);  // recomputed activation
    if (!gelu_in_product) {
      track.take(fc1);
      track.give(act);  // gradient of the activation's output
    }
    track.give(fc1);  // the saved output of linear_fc1
    around.column_backward(fc1, track);
  }
};

OffloadedBytes offloaded_bytes(const TransformerConfig& c, const MlpTensors& z,
                               const LayerShape& shape) {
  OffloadedBytes out;
  const StreamCost& around = z.around;
  offload(c, "mlp_norm", &SavedBytes::residual, around.stream, shape.residual, 1, out);
  if (c.recomputes("mlp")) return out;
  const int64_t e = shape.element;
  offload(c, "mlp_fc1", &SavedBytes::norms, around.recompute_norm ? 0 : around.normed, e, 1, out);
  offload(c, "mlp_fc1", &SavedBytes::norms, around.stats, shape.sum,
          c.normalization == Normalization::kLayerNorm ? 2 : 1, out);
  offload(c, "mlp_act", &SavedBytes::mlp, z.fc1, e, 1, out);
  offload(c, "mlp_fc2", &SavedBytes::mlp, z.act_saved, e, 1, out);
  return out;
}

// Per token, forward and backward.
double mlp_moved_elements(const TransformerConfig& c, int64_t layer_number) {
  const auto h = static_cast<double>(c.hidden_size), f = static_cast<double>(c.ffn_hidden_size);
  const bool gated = is_gated(c.activation());
  double elements = kNormElements * h;
  if (c.add_bias_linear) elements += h + (gated ? 2 * f : f);
  // The activation: x, y; and in the backward, unless a GEMM does it, dy, x, dx
  elements += gated ? 8 * f : is_gelu_in_product(c, layer_number) ? 2 * f : 5 * f;
  const QuantizationOptions options = c.quantization(layer_number);
  if (!options.enabled()) return elements;
  // Casts: Note [Bytes of casts] in layer_cost.h
  if (options.recipe != QuantizationRecipe::kTensorwise) return elements + h;
  elements += h;                      // result of the norm: x again
  elements += 2 * f;                  // output of the activation
  elements += gated ? 3 * f : 2 * f;  // its gradient: x and dy again
  return elements + 2 * h;            // gradient of the residual stream: read, write quantised
}

}  // namespace

SublayerCost mlp_cost(const TransformerConfig& c, int64_t layer_number, const LayerShape& shape,
                      bool offloaded) {
  const MlpTensors z(c, layer_number, shape);
  const StreamCost& around = z.around;
  const bool recompute = c.recomputes("mlp");
  SublayerCost cost;
  cost.saved.residual = around.stream;
  if (!recompute) {
    cost.saved.norms = around.pre_norm_saved + around.post_norm_saved;
    cost.saved.mlp = z.fc1 + z.act_saved;
  }
  if (offloaded) cost.offloaded = offloaded_bytes(c, z, shape);
  cost.set_peaks([&](AllocationTrack& track) { z.forward(track); },
                 [&](AllocationTrack& track) { z.backward(track); }, z.unrecorded_peak(),
                 recompute);
  cost.pending = around.pending() + z.fc1 + z.act;
  if (!c.quantization(layer_number).enabled()) cost.postponed = z.act;
  const int64_t h = c.hidden_size, f = c.ffn_hidden_size;
  const bool gated = is_gated(c.activation());
  cost.linears = {{"linear_fc1", gated ? 2 * f : f, h, false, gated && !c.swiglu ? f : 0},
                  {"linear_fc2", h, f, z.gelu_in_product}};
  cost.moved_elements = mlp_moved_elements(c, layer_number);
  cost.tensor = around.tensor_traffic(shape);
  if (recompute) {
    cost.recomputed_products = cost.weight_products();
    cost.tensor.backward += cost.tensor.forward;
  }
  return cost;
}

}  // namespace megatron
