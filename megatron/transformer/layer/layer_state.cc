#include "megatron/transformer/layer/layer_state.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/layer.h"

namespace megatron {

DecodingState::DecodingState(DecodingShape shape) : shape_(std::move(shape)) {}

LayerState* DecodingState::of(const Layer& layer) {
  const auto [state, is_new] = states_.try_emplace(&layer);
  if (is_new) state->second = layer.make_state(shape_);
  return state->second.get();
}

void DecodingState::advance(int64_t count) {
  length_ += count;
  MEGATRON_ASSERT(length_ <= shape_.capacity, length_, " positions in a state for ",
                  shape_.capacity);
}

at::Tensor DecodingState::padding_mask(int64_t count, at::Device device) const {
  if (std::all_of(shape_.padding.begin(), shape_.padding.end(), [](int64_t n) { return n == 0; }))
    return {};
  const auto options = at::dtype(at::kLong);
  const int64_t b = static_cast<int64_t>(shape_.padding.size()), end = length_ + count;
  const at::Tensor first = at::tensor(shape_.padding, options).to(device).view({b, 1, 1, 1});
  const at::Tensor key = at::arange(end, options.device(device)).view({1, 1, 1, end});
  return (key < first).expand({b, 1, count, end});
}

void DecodingState::clear() {
  length_ = 0;
  for (const auto& [layer, state] : states_)
    if (state) state->clear();
}

void DecodingState::reorder(const at::Tensor& rows) {
  const at::Tensor host = rows.to(at::kCPU).contiguous();
  std::vector<int64_t> padding;
  for (int64_t i = 0; i < host.numel(); ++i)
    padding.push_back(shape_.padding.at(static_cast<size_t>(host.const_data_ptr<int64_t>()[i])));
  shape_.padding = std::move(padding);
  for (const auto& [layer, state] : states_)
    if (state) state->reorder(rows);
}

int64_t DecodingState::bytes() const {
  int64_t sum = 0;
  for (const auto& [layer, state] : states_)
    if (state) sum += state->bytes();
  return sum;
}

}  // namespace megatron
