#include "megatron/models/common/segments.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {

std::shared_ptr<const UnpaddedRows> segments_of_lengths(std::span<const int64_t> lengths,
                                                        int64_t rows) {
  if (lengths.empty()) return no_segments(1);
  const int64_t longest = *std::ranges::max_element(lengths);
  std::vector<uint8_t> mask;
  for (const int64_t length : lengths) {
    mask.insert(mask.end(), static_cast<size_t>(length), 1);
    mask.insert(mask.end(), static_cast<size_t>(longest - length), 0);
  }
  std::vector<int64_t> numbers(lengths.size());
  std::iota(numbers.begin(), numbers.end(), 0);
  return std::make_shared<const UnpaddedRows>(make_unpadded_rows({mask}, numbers, 1, rows));
}

std::shared_ptr<const UnpaddedRows> no_segments(int64_t length) {
  auto out = std::make_shared<UnpaddedRows>();
  out->length = length;
  for (at::Tensor* tensor : out->tensors()) *tensor = at::empty({0}, at::kLong);
  out->kinds = at::empty({0, length}, at::kLong);
  out->offsets = at::zeros({1}, at::kInt);
  out->counts = at::empty({0}, at::kInt);
  return out;
}

at::Tensor keep_held(const at::Tensor& held, int64_t b, int64_t s, at::Tensor& places,
                     at::Tensor& taken) {
  at::Tensor place = at::full({b, s}, -1, at::kLong);
  place.index_copy_(1, held, at::arange(b * held.size(0), at::kLong).view({b, held.size(0)}));
  place = place.flatten();
  const at::Tensor to = place.index_select(0, places), kept = to.ge(0);
  taken = (taken.defined() ? taken : at::arange(places.size(0), at::kLong)).masked_select(kept);
  places = to.masked_select(kept);
  return place;
}

std::shared_ptr<const UnpaddedRows> on_device(const std::shared_ptr<const UnpaddedRows>& segments,
                                              c10::Device device) {
  if (segments == nullptr) return nullptr;
  auto out = std::make_shared<UnpaddedRows>(*segments);
  for (at::Tensor* tensor : out->tensors()) *tensor = to_device(*tensor, device);
  return out;
}

}  // namespace megatron
