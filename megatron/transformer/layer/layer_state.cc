#include "megatron/transformer/layer/layer_state.h"

#include "megatron/transformer/layer/layer.h"

namespace megatron {

LayerState* DecodingState::of(const Layer& layer) {
  const auto [state, is_new] = states_.try_emplace(&layer);
  if (is_new) state->second = layer.make_state();
  return state->second.get();
}

void DecodingState::clear() {
  for (const auto& [layer, state] : states_)
    if (state) state->clear();
}

int64_t DecodingState::bytes() const {
  int64_t sum = 0;
  for (const auto& [layer, state] : states_)
    if (state) sum += state->bytes();
  return sum;
}

}  // namespace megatron
