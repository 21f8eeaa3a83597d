#include "megatron/transformer/recurrent/recurrent_cost.h"

#include <algorithm>

#include "megatron/transformer/feed_forward/mlp_cost.h"

namespace megatron {
namespace {

SublayerCost recurrence_cost(const TransformerConfig& config, const LayerShape& shape) {
  const StreamCost around(config, shape);
  const int64_t n = shape.tokens * config.hidden_size / shape.tensor * shape.element;
  const int64_t sequence = shape.tokens / shape.samples, step = n / sequence;  // of one position
  SublayerCost cost;
  cost.saved.residual = around.stream;
  cost.saved.norms = around.pre_norm_saved + around.post_norm_saved;
  cost.saved.attention = 7 * n;

  const auto forward = [&](AllocationTrack& track) {
    around.column_forward(3 * n, track);
    track.take(2 * n);  // gate, states
    track.touch(4 * step);
    track.take(2 * n);  // silu, output
    around.row_forward(0, track);
  };
  const int64_t unrecorded = std::max({3 * n + around.normed + around.cast + around.gathered, 7 * n,
                                       4 * n + around.product + around.part});
  const auto backward = [&](AllocationTrack& track) {
    around.row_backward(n, n, track);
    track.take(2 * n);  // gradients of states and silu
    track.give(2 * n);  // of the output; the saved silu
    track.take(n);      // of silu's input
    track.give(n);
    track.take(2 * n);  // of gate and what is read
    track.touch(4 * step);
    track.give(5 * n);  // of the states; saved states and output of linear_in
    track.take(n);      // of the gate's input
    track.give(2 * n);
    track.take(3 * n);  // the three as one
    track.give(3 * n);
    around.column_backward(3 * n, track);
  };
  cost.set_peaks(forward, backward, unrecorded);

  cost.pending = around.pending() + 4 * n;
  cost.kept.sequence = step;
  const int64_t h = config.hidden_size;
  cost.linears = {{"linear_in", 3 * h, h}, {"linear_out", h, h}};
  // Norm 2, sigmoid 2, scan 3, silu 2, product 3; backward 3, 3, 6, 3, 5, and 6 to join the parts
  cost.moved_elements = 38.0 * static_cast<double>(h);
  cost.tensor = around.tensor_traffic(shape);
  return cost;
}

}  // namespace

LayerCost recurrent_layer_cost(const TransformerConfig& config, int64_t layer_number,
                               const LayerShape& shape, bool offloaded) {
  LayerCost cost;
  cost.first = recurrence_cost(config, shape);
  cost.second = mlp_cost(config, layer_number, shape, offloaded);
  cost.stream = cost.first.saved.residual;
  return cost;
}

}  // namespace megatron
