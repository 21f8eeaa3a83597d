#include "megatron/models/vision/packed_images.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/tensor/host_copy.h"
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

std::shared_ptr<const UnpaddedRows> no_segments(int64_t length) {
  auto out = std::make_shared<UnpaddedRows>();
  out->length = length;
  for (at::Tensor* tensor : out->tensors()) *tensor = at::empty({0}, at::kLong);
  out->kinds = at::empty({0, length}, at::kLong);
  out->offsets = at::zeros({1}, at::kInt);
  out->counts = at::empty({0}, at::kInt);
  return out;
}

constexpr int64_t kNewline = -1;

// The features of an image in the order of its tokens, counted from its first picture's, and
// kNewline where image_newline stands.
std::vector<int64_t> order_of(const VisionConfig& config, const SeenImage& image) {
  std::vector<int64_t> order;
  if (!config.vision_newlines) {
    order.resize(static_cast<size_t>(image.pictures * config.features()));
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
  const int64_t rows = config.patch_rows(), columns = config.patch_columns(), one = rows * columns;
  order.resize(static_cast<size_t>(one));
  std::iota(order.begin(), order.end(), 0);
  if (image.pictures == 1) {
    order.push_back(kNewline);
    return order;
  }
  MEGATRON_CHECK(image.pictures == 1 + image.grid.count(), "an image of ", image.pictures,
                 " pictures: expected its ", image.grid.rows, " x ", image.grid.columns,
                 " tiles and the whole of it");
  const ImageBox kept =
      unpadded_map(image.size, {image.grid.rows * rows, image.grid.columns * columns});
  for (int64_t y = kept.top; y < kept.top + kept.size.height; ++y) {
    for (int64_t x = kept.left; x < kept.left + kept.size.width; ++x) {
      const int64_t tile = 1 + y / rows * image.grid.columns + x / columns;
      order.push_back(tile * one + y % rows * columns + x % columns);
    }
    order.push_back(kNewline);
  }
  return order;
}

// By image the number of its first picture among those of all ranks. `most`: pictures of the rank
// that has most, which each rank's part has room for.
std::vector<int64_t> first_pictures(std::span<const SeenImage> images, int ranks, int64_t& most) {
  std::vector<int64_t> counts(static_cast<size_t>(ranks), 0), out;
  for (const SeenImage& image : images) {
    int64_t& count = counts.at(static_cast<size_t>(image.owner));
    out.push_back(count);
    count += image.pictures;
  }
  most = *std::ranges::max_element(counts);
  for (size_t k = 0; k < out.size(); ++k) out[k] += images[k].owner * most;
  return out;
}

}  // namespace

int64_t image_tokens(const VisionConfig& config, const SeenImage& image) {
  return std::ssize(order_of(config, image));
}

PackedImages pack_images(const VisionConfig& config, std::span<const SeenImage> images,
                         at::Tensor patches, at::Tensor pixel_values,
                         std::span<const int64_t> tokens, int64_t samples, int64_t image_token,
                         int rank, int ranks) {
  MEGATRON_ASSERT(samples > 0 && std::ssize(tokens) % samples == 0, tokens.size(), " tokens of ",
                  samples, " samples");
  const int64_t s = std::ssize(tokens) / samples;
  const auto by_sample = [](const SeenImage& a, const SeenImage& b) { return a.sample < b.sample; };
  MEGATRON_ASSERT(std::is_sorted(images.begin(), images.end(), by_sample),
                  "images that are not in the order of their samples");
  PackedImages out;
  out.ranks = ranks;
  const std::vector<int64_t> first = first_pictures(images, ranks, out.most_pictures);
  std::vector<int64_t> places, taken, newlines;
  auto image = images.begin();
  for (int64_t i = 0; i < samples; ++i) {
    std::vector<int64_t> order;  // of the features of the sample
    int64_t count = 0;
    for (; image != images.end() && image->sample == i; ++image, ++count) {
      MEGATRON_CHECK(image->rows == config.patch_rows() && image->columns == config.patch_columns(),
                     "a picture of ", image->rows, " x ", image->columns,
                     " patches: the encoder has learned positions of ", config.patch_rows(), " x ",
                     config.patch_columns(), "\nhint: resize it to ", config.img_h, " x ",
                     config.img_w);
      const int64_t before = first[static_cast<size_t>(image - images.begin())] * config.features();
      for (const int64_t feature : order_of(config, *image))
        order.push_back(feature == kNewline ? kNewline : before + feature);
      out.all_pictures += image->pictures;
      if (image->owner == rank) out.pictures += image->pictures;
    }
    size_t next = 0;
    for (int64_t j = 0; j < s; ++j) {
      if (tokens[static_cast<size_t>(i * s + j)] != image_token) continue;
      const int64_t feature = next < order.size() ? order[next] : 0;
      ++next;
      (feature == kNewline ? newlines : places).push_back(i * s + j);
      if (feature != kNewline) taken.push_back(feature);
    }
    MEGATRON_CHECK(next == order.size(), "sample ", i, " of the micro-batch has ", next,
                   " image tokens (id ", image_token, "), its ", count,
                   count == 1 ? " image has " : " images have ", order.size(), " features");
  }
  MEGATRON_ASSERT(image == images.end(), "an image of sample ", image->sample, " of ", samples);
  check_shape("patches", patches,
              {out.pictures * config.patches(), 3 * config.patch_dim * config.patch_dim});
  out.patches = std::move(patches);
  out.pixel_values = std::move(pixel_values);
  out.places = at::tensor(places, at::kLong);
  if (config.vision_newlines || ranks > 1) out.taken = at::tensor(taken, at::kLong);
  if (config.vision_newlines) out.newlines = at::tensor(newlines, at::kLong);
  out.segments = out.pictures > 0 ? equal_segments(out.pictures, config.encoder_rows())
                                  : no_segments(config.encoder_rows());
  return out;
}

PackedImages to_device(const PackedImages& images, at::Device device) {
  PackedImages out = images;
  for (at::Tensor* tensor :
       {&out.patches, &out.pixel_values, &out.places, &out.taken, &out.newlines})
    if (tensor->defined()) *tensor = to_device(*tensor, device);
  if (images.segments == nullptr) return out;
  auto segments = std::make_shared<UnpaddedRows>(*images.segments);
  for (at::Tensor* tensor : segments->tensors()) *tensor = to_device(*tensor, device);
  out.segments = std::move(segments);
  return out;
}

}  // namespace megatron
