#include "megatron/models/vision/packed_images.h"

#include <algorithm>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/models/common/segments.h"
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
  UnpaddedRows rows = make_unpadded_rows({mask}, numbers, 1);
  rows.uniform = true;
  rows.most_empty = 0;
  return std::make_shared<const UnpaddedRows>(std::move(rows));
}

constexpr int64_t kNewline = -1;
constexpr int64_t kMerged = 2;  // side of a block of patches in a picture of its own size

int64_t features_of(const VisionConfig& config, const SeenImage& image) {
  const int64_t one =
      config.has_own_sizes() ? image.rows * image.columns / (kMerged * kMerged) : config.features();
  return image.pictures * one;
}

void check_size(const VisionConfig& config, const SeenImage& image) {
  if (config.has_own_sizes())
    MEGATRON_CHECK(image.rows > 0 && image.columns > 0 && image.rows % kMerged == 0 &&
                       image.columns % kMerged == 0 && image.pictures == 1,
                   "a picture of ", image.rows, " x ", image.columns,
                   " patches: both numbers must be even");
  else
    MEGATRON_CHECK(image.rows == config.patch_rows() && image.columns == config.patch_columns(),
                   "a picture of ", image.rows, " x ", image.columns,
                   " patches: the encoder has learned positions of ", config.patch_rows(), " x ",
                   config.patch_columns(), "\nhint: resize it to ", config.img_h, " x ",
                   config.img_w);
}

constexpr int64_t kBlock = kMerged * kMerged;  // patches that become one feature

// Of a picture of its own size the blocks of patches in the order of the encoder; `windows` as in
// window_order().
std::vector<int64_t> block_order(const VisionConfig& config, const SeenImage& image,
                                 std::vector<int64_t>* windows = nullptr) {
  const int64_t rows = image.rows / kMerged, columns = image.columns / kMerged;
  if (config.has_windows()) return window_order(rows, columns, config.window_side(), windows);
  std::vector<int64_t> order(static_cast<size_t>(rows * columns));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Segments, windows and patch_places of pictures of own sizes.
void pack_own_sizes(const VisionConfig& config, std::span<const SeenImage> images, int rank,
                    PackedImages& out) {
  std::vector<int64_t> places, lengths, windows, order;
  for (const SeenImage& image : images) {
    if (image.owner != rank) continue;
    lengths.push_back(image.rows * image.columns);
    const int64_t before = std::ssize(order), across = image.columns / kMerged;
    for (const int64_t block : block_order(config, image, &windows)) {
      order.push_back(before + block);
      for (int64_t i = 0; i < kBlock; ++i) {
        places.push_back(block / across * kMerged + i / kMerged);
        places.push_back(block % across * kMerged + i % kMerged);
      }
    }
  }
  out.segments = segments_of_lengths(lengths);
  places.resize(static_cast<size_t>(2 * out.segments->rows), 0);
  out.patch_places = at::tensor(places, at::kLong).view({1, out.segments->rows, 2});
  if (!config.has_windows()) return;
  for (int64_t& window : windows) window *= kBlock;
  out.windows = segments_of_lengths(windows, out.segments->rows);
  out.window_order = at::tensor(order, at::kLong);
}

// The positions of the tokens of a sample, of which those of images are the features of `images`.
void place_tokens(std::span<const SeenImage> images, std::span<const int64_t> tokens,
                  std::span<const int64_t> position_ids, int64_t image_token,
                  std::vector<int64_t>& out) {
  int64_t next = 0;
  const auto begins = [&](size_t i) { return i < position_ids.size() && position_ids[i] == 0; };
  for (size_t i = 0; i < tokens.size();) {
    if (begins(i)) next = 0;
    if (tokens[i] != image_token || images.empty()) {
      out.insert(out.end(), 3, next++);
      ++i;
      continue;
    }
    const int64_t rows = images.front().rows / kMerged, columns = images.front().columns / kMerged;
    for (int64_t y = 0; y < rows; ++y)
      for (int64_t x = 0; x < columns; ++x) out.insert(out.end(), {next, next + y, next + x});
    next += std::max(rows, columns);
    i += static_cast<size_t>(rows * columns);
    images = images.subspan(1);
  }
}

// The features of an image in the order of its tokens, counted from its first picture's, and
// kNewline where image_newline stands.
std::vector<int64_t> order_of(const VisionConfig& config, const SeenImage& image) {
  std::vector<int64_t> order;
  if (config.has_windows()) {
    const std::vector<int64_t> blocks = block_order(config, image);
    order.resize(blocks.size());
    for (size_t k = 0; k < blocks.size(); ++k)
      order[static_cast<size_t>(blocks[k])] = static_cast<int64_t>(k);
    return order;
  }
  if (!config.vision_newlines) {
    order.resize(static_cast<size_t>(features_of(config, image)));
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

// By image where its features begin.
DividedFeatures divided_features(const VisionConfig& config, std::span<const SeenImage> images,
                                 int64_t samples, int rank, int ranks, int64_t replicas) {
  std::vector<OwnedFeatures> owned;
  for (const SeenImage& image : images)
    owned.push_back({image.sample, features_of(config, image), image.owner});
  return divide_features(owned, samples, rank, ranks, replicas);
}

}  // namespace

std::vector<int64_t> window_order(int64_t rows, int64_t columns, int64_t side,
                                  std::vector<int64_t>* lengths) {
  std::vector<int64_t> order;
  for (int64_t top = 0; top < rows; top += side)
    for (int64_t left = 0; left < columns; left += side) {
      const int64_t bottom = std::min(top + side, rows), right = std::min(left + side, columns);
      for (int64_t y = top; y < bottom; ++y)
        for (int64_t x = left; x < right; ++x) order.push_back(y * columns + x);
      if (lengths != nullptr) lengths->push_back((bottom - top) * (right - left));
    }
  return order;
}

int64_t image_tokens(const VisionConfig& config, const SeenImage& image) {
  return std::ssize(order_of(config, image));
}

PackedImages pack_images(const VisionConfig& config, std::span<const SeenImage> images,
                         at::Tensor patches, at::Tensor pixel_values,
                         std::span<const int64_t> tokens, int64_t samples, int64_t image_token,
                         int rank, int ranks, std::span<const int64_t> position_ids,
                         int64_t replicas) {
  MEGATRON_ASSERT(samples > 0 && std::ssize(tokens) % samples == 0, tokens.size(), " tokens of ",
                  samples, " samples");
  const int64_t s = std::ssize(tokens) / samples;
  const auto by_sample = [](const SeenImage& a, const SeenImage& b) { return a.sample < b.sample; };
  MEGATRON_ASSERT(std::is_sorted(images.begin(), images.end(), by_sample),
                  "images that are not in the order of their samples");
  PackedImages out;
  out.ranks = replicas > 0 ? 1 : ranks;
  DividedFeatures divided = divided_features(config, images, samples, rank, ranks, replicas);
  out.most_features = divided.most;
  out.parts = std::move(divided.parts);
  std::vector<int64_t> places, taken, newlines, positions;
  int64_t out_patches = 0;  // of this rank
  auto image = images.begin();
  for (int64_t i = 0; i < samples; ++i) {
    std::vector<int64_t> order;  // of the features of the sample
    int64_t count = 0;
    for (; image != images.end() && image->sample == i; ++image, ++count) {
      check_size(config, *image);
      const int64_t before = divided.first[static_cast<size_t>(image - images.begin())];
      for (const int64_t feature : order_of(config, *image))
        order.push_back(feature == kNewline ? kNewline : before + feature);
      out.all_pictures += image->pictures;
      if (image->owner != rank) continue;
      out.pictures += image->pictures;
      out.features += features_of(config, *image);
      out_patches += image->pictures * image->rows * image->columns;
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
    if (config.has_own_sizes()) {
      const auto of_sample = [&](std::span<const int64_t> all) {
        return all.empty() ? all : all.subspan(static_cast<size_t>(i * s), static_cast<size_t>(s));
      };
      place_tokens({image - count, image}, of_sample(tokens), of_sample(position_ids), image_token,
                   positions);
    }
  }
  MEGATRON_ASSERT(image == images.end(), "an image of sample ", image->sample, " of ", samples);
  if (patches.defined()) check_shape("patches", patches, {out_patches, config.patch_elements()});
  out.patches = std::move(patches);
  out.pixel_values = std::move(pixel_values);
  out.places = at::tensor(places, at::kLong);
  if (config.vision_newlines || config.has_windows() || ranks > 1)
    out.taken = at::tensor(taken, at::kLong);
  if (config.vision_newlines) out.newlines = at::tensor(newlines, at::kLong);
  if (config.has_own_sizes()) {
    out.positions = at::tensor(positions, at::kLong).view({samples, s, 3});
    pack_own_sizes(config, images, rank, out);
    return out;
  }
  out.segments = out.pictures > 0 ? equal_segments(out.pictures, config.encoder_rows())
                                  : no_segments(config.encoder_rows());
  return out;
}

PackedImages PackedImages::of_tokens(const at::Tensor& held, int64_t b, int64_t s) const {
  PackedImages out = *this;
  const at::Tensor place = keep_held(held, b, s, out.places, out.taken);
  if (newlines.defined()) {
    const at::Tensor ends = place.index_select(0, newlines);
    out.newlines = ends.masked_select(ends.ge(0));
  }
  if (positions.defined()) out.positions = positions.index_select(1, held);
  return out;
}

PackedImages PackedImages::of_rows(int64_t b, int64_t s) const {
  PackedImages out = *this;
  const auto options = places.options();
  const at::Tensor rows = at::arange(b, options).mul(s).unsqueeze(1);
  const auto of_all = [&](const at::Tensor& x) { return (rows + x.unsqueeze(0)).flatten(); };
  out.places = of_all(places);
  out.taken = (taken.defined() ? taken : at::arange(places.size(0), options)).repeat({b});
  if (newlines.defined()) out.newlines = of_all(newlines);
  if (!positions.defined()) return out;
  const int64_t behind = s - positions.size(1);
  const at::Tensor next =
      (positions.amax() + 1 + at::arange(behind, options)).view({1, behind, 1}).expand({1, -1, 3});
  out.positions = at::cat({positions, next}, 1).expand({b, -1, -1});
  return out;
}

std::vector<int64_t> PackedImages::positions_of(int64_t n) const {
  if (!positions.defined()) return {};
  const at::Tensor first = positions.select(0, 0).narrow(0, 0, n).to(at::kCPU).contiguous();
  const int64_t* values = first.const_data_ptr<int64_t>();
  return {values, values + first.numel()};
}

PackedImages to_device(const PackedImages& images, at::Device device) {
  PackedImages out = images;
  for (at::Tensor* tensor : {&out.patches, &out.pixel_values, &out.places, &out.taken,
                             &out.newlines, &out.patch_places, &out.positions, &out.window_order})
    if (tensor->defined()) *tensor = to_device(*tensor, device);
  out.segments = on_device(images.segments, device);
  out.windows = on_device(images.windows, device);
  out.blocks = to_device(images.blocks, device);
  return out;
}

}  // namespace megatron
