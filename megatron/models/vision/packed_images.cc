#include "megatron/models/vision/packed_images.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Segments of equal length, so that no row is empty.
std::shared_ptr<const UnpaddedRows> equal_segments(int64_t count, int64_t length) {
  const std::vector<uint8_t> mask(static_cast<size_t>(count * length), 1);
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return std::make_shared<const UnpaddedRows>(make_unpadded_rows({mask}, numbers, 1));
}

}  // namespace

PackedImages pack_images(const VisionConfig& config, std::vector<Picture> pictures,
                         at::Tensor patches, at::Tensor pixel_values,
                         std::span<const int64_t> tokens, int64_t samples, int64_t image_token) {
  MEGATRON_ASSERT(samples > 0 && std::ssize(tokens) % samples == 0, tokens.size(), " tokens of ",
                  samples, " samples");
  const int64_t s = std::ssize(tokens) / samples, count = std::ssize(pictures);
  std::vector<int64_t> pictures_of(static_cast<size_t>(samples));
  for (const Picture& picture : pictures) {
    MEGATRON_CHECK(picture.rows == config.patch_rows() && picture.columns == config.patch_columns(),
                   "a picture of ", picture.rows, " x ", picture.columns,
                   " patches: the encoder has learned positions of ", config.patch_rows(), " x ",
                   config.patch_columns(), "\nhint: resize it to ", config.img_h, " x ",
                   config.img_w);
    ++pictures_of.at(static_cast<size_t>(picture.sample));
  }
  MEGATRON_ASSERT(
      std::is_sorted(pictures.begin(), pictures.end(),
                     [](const Picture& a, const Picture& b) { return a.sample < b.sample; }),
      "pictures that are not in the order of their samples");
  check_shape("patches", patches,
              {count * config.patches(), 3 * config.patch_dim * config.patch_dim});
  std::vector<int64_t> places;
  for (int64_t i = 0; i < samples; ++i) {
    const size_t before = places.size();
    for (int64_t j = 0; j < s; ++j)
      if (tokens[static_cast<size_t>(i * s + j)] == image_token) places.push_back(i * s + j);
    const int64_t has = std::ssize(places) - static_cast<int64_t>(before),
                  pictures_here = pictures_of[static_cast<size_t>(i)],
                  expected = pictures_here * config.features();
    MEGATRON_CHECK(has == expected, "sample ", i, " of the micro-batch has ", has,
                   " image tokens (id ", image_token, "), its ", pictures_here, " pictures have ",
                   expected, " features");
  }
  PackedImages out;
  out.pictures = std::move(pictures);
  out.patches = std::move(patches);
  out.pixel_values = std::move(pixel_values);
  out.places = at::tensor(places, at::kLong);
  if (count > 0) out.segments = equal_segments(count, config.encoder_rows());
  return out;
}

PackedImages to_device(const PackedImages& images, at::Device device) {
  PackedImages out = images;
  for (at::Tensor* tensor : {&out.patches, &out.pixel_values, &out.places})
    if (tensor->defined()) *tensor = tensor->to(device);
  if (images.segments == nullptr) return out;
  auto segments = std::make_shared<UnpaddedRows>(*images.segments);
  for (at::Tensor* tensor : segments->tensors()) *tensor = tensor->to(device);
  out.segments = std::move(segments);
  return out;
}

}  // namespace megatron
