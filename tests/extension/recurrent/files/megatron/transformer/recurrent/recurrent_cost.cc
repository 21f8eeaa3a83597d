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

  AllocationTrack forward;
  around.column_forward(3 * n, forward);
  forward.take(2 * n);  // gate, states
  forward.touch(4 * step);
  forward.take(2 * n);  // silu, output
  around.row_forward(0, forward);
  cost.forward_peak = forward.most();
  cost.forward_end = forward.live();
  cost.unrecorded_peak = std::max({3 * n + around.normed + around.cast + around.gathered, 7 * n,
                                   4 * n + around.product + around.part});

  AllocationTrack backward;
  around.row_backward(n, n, backward);
  backward.take(2 * n);  // gradients of states and silu
  backward.give(2 * n);  // of the output; the saved silu
  backward.take(n);      // of silu's input
  backward.give(n);
  backward.take(2 * n);  // of gate and what is read
  backward.touch(4 * step);
  backward.give(5 * n);  // of the states; saved states and output of linear_in
  backward.take(n);      // of the gate's input
  backward.give(2 * n);
  backward.take(3 * n);  // the three as one
  backward.give(3 * n);
  around.column_backward(3 * n, backward);
  cost.backward_peak = backward.most();
  cost.backward_end = backward.live();

  cost.pending = around.pending() + 4 * n;
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
