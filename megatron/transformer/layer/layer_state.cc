#include "megatron/transformer/layer/layer_state.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

void Layer::keep_encoded(const at::Tensor& /*encoded*/, LayerState& /*state*/,
                         const SequenceSlot& /*slot*/) {
  MEGATRON_ASSERT(false, "layer ", layer_number_, " reads no encoder's output");
}

LayerState* DecodingState::of(const Layer& layer) {
  const auto [place, is_new] = places_.try_emplace(&layer, states_.size());
  if (is_new) {
    states_.push_back(layer.make_state());
    if (states_.back()) states_.back()->keep_as(keeping_);
    if (measuring_ && states_.back())
      for (PagedBuffer* buffer : states_.back()->paged()) buffer->measure();
  }
  return states_[place->second].get();
}

void DecodingState::for_each_paged(const std::function<void(PagedBuffer&)>& f) const {
  for (const auto& state : states_)
    for (PagedBuffer* buffer : state ? state->paged() : std::vector<PagedBuffer*>()) f(*buffer);
}

void DecodingState::for_each_slots(const std::function<void(SlotBuffer&)>& f) const {
  for (const auto& state : states_)
    for (SlotBuffer* buffer : state ? state->slots() : std::vector<SlotBuffer*>()) f(*buffer);
}

void DecodingState::for_each(const std::function<void(StateBuffer&)>& f) const {
  for_each_paged(f);
  for_each_slots(f);
}

void DecodingState::clear() {
  for_each([](StateBuffer& buffer) { buffer.clear(); });
}

int64_t DecodingState::bytes() const {
  int64_t sum = 0;
  for_each([&](StateBuffer& buffer) { sum += buffer.bytes(); });
  return sum;
}

bool DecodingState::takes_back() const {
  return std::ranges::all_of(states_, [](const auto& state) {
    return !state || state->slots().empty() || state->takes_back();
  });
}

}  // namespace megatron
