#include "megatron/transformer/ssm/recurrent_cost.h"

#include <algorithm>

namespace megatron {

void RecurrentTensors::forward(AllocationTrack& track) const {
  around.column_forward(mixed, track);
  track.take(saved - mixed);
  track.touch(forward_extra);
  track.take(o_saved);
  around.row_forward(y - o_saved, track);
}

int64_t RecurrentTensors::unrecorded_peak() const {
  return mixed + std::max(around.normed + around.cast + around.gathered,
                          std::max(y + forward_extra, 2 * y + around.product + around.part));
}

void RecurrentTensors::backward(AllocationTrack& track) const {
  around.row_backward(y, o_saved, track);
  track.touch(y - o_saved);  // the norm's output made again
  track.take(mixed);
  track.touch(y + backward_extra);
  track.give(y + saved);
  around.column_backward(mixed, track);
}

SublayerCost recurrent_cost(const TransformerConfig& config, int64_t layer_number,
                            const LayerShape& shape, const RecurrentTensors& z, bool recompute) {
  SublayerCost cost;
  cost.saved.residual = z.around.stream;
  if (!recompute) {
    cost.saved.norms = z.around.pre_norm_saved + z.around.post_norm_saved;
    cost.saved.attention = z.saved + z.o_saved;
  }
  cost.set_peaks([&](AllocationTrack& track) { z.forward(track); },
                 [&](AllocationTrack& track) { z.backward(track); }, z.unrecorded_peak(),
                 recompute);
  cost.pending = z.around.pending() + z.mixed + z.y;
  if (!config.quantization(layer_number).enabled()) cost.postponed = z.y;
  cost.tensor = z.around.tensor_traffic(shape);
  return cost;
}

}  // namespace megatron
