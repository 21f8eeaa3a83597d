#include "megatron/models/common/segments.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
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
  UnpaddedRows out = make_unpadded_rows({mask}, numbers, 1, rows);
  use_few_plans(out);
  return std::make_shared<const UnpaddedRows>(std::move(out));
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

DividedFeatures divide_features(std::span<const OwnedFeatures> media, int64_t samples, int rank,
                                int ranks, int64_t replicas) {
  DividedFeatures out;
  std::vector<int64_t> counts(static_cast<size_t>(ranks), 0);
  for (const OwnedFeatures& one : media) {
    int64_t& count = counts.at(static_cast<size_t>(one.owner));
    out.first.push_back(count);
    count += one.features;
  }
  out.most = *std::ranges::max_element(counts);
  std::vector<int64_t> begins(counts.size());
  for (size_t owner = 0; owner < counts.size(); ++owner)
    begins[owner] = static_cast<int64_t>(owner) * out.most;
  if (replicas > 0 && rank < 0) {
    std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), int64_t{0});
    out.parts = counts;
  } else if (replicas > 0) {
    MEGATRON_ASSERT(samples % replicas == 0, samples, " samples of ", replicas, " replicas");
    out.parts.assign(static_cast<size_t>(replicas), 0);
    for (const OwnedFeatures& one : media)
      if (one.owner == rank)
        out.parts[static_cast<size_t>(one.sample / (samples / replicas))] += one.features;
  }
  for (size_t k = 0; k < media.size(); ++k)
    out.first[k] += begins[static_cast<size_t>(media[k].owner)];
  return out;
}

std::shared_ptr<const UnpaddedRows> on_device(const std::shared_ptr<const UnpaddedRows>& segments,
                                              c10::Device device) {
  if (segments == nullptr) return nullptr;
  auto out = std::make_shared<UnpaddedRows>(*segments);
  for (at::Tensor* tensor : out->tensors()) *tensor = to_device(*tensor, device);
  return out;
}

}  // namespace megatron
