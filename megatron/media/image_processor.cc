#include "megatron/media/image_processor.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Kind = ImageProcessorConfig::Kind;

ImageBox whole(ImageSize size) { return {0, 0, size}; }

PicturePlan squashed(const ImageBox& source, ImageSize size) {
  return {source, size, whole(size), size};
}

// int(short * long / short_of_image) of the longer side.
ImageSize with_shortest_edge(ImageSize image, int64_t edge) {
  const auto [height, width] = image;
  const auto longer = static_cast<int64_t>(static_cast<double>(edge * std::max(height, width)) /
                                           static_cast<double>(std::min(height, width)));
  return width <= height ? ImageSize{longer, edge} : ImageSize{edge, longer};
}

// Along one axis: the centre `crop` of `size` samples, or zeros around all of them.
struct Centred {
  int64_t first, count, before;
};
Centred centred(int64_t size, int64_t crop) {
  // The picture begins at sample `begin` of the resized image, which may be negative.
  const int64_t begin = crop <= size ? (size - crop) / 2 : -((crop - size + 1) / 2);
  const int64_t first = std::max<int64_t>(0, begin);
  return {first, std::min(size, begin + crop) - first, std::max<int64_t>(0, -begin)};
}

PicturePlan plain_picture(const ImageProcessorConfig& config, ImageSize image) {
  const ImageSize resized =
      config.shortest_edge > 0 ? with_shortest_edge(image, config.shortest_edge) : config.size;
  if (!config.crop) return squashed(whole(image), resized);
  const Centred y = centred(resized.height, config.crop->height);
  const Centred x = centred(resized.width, config.crop->width);
  return {whole(image), resized,  {y.first, x.first, {y.count, x.count}},
          *config.crop, y.before, x.before};
}

// What a tile that begins at `tile` of a picture has of samples [begin, begin + count) in it.
Centred overlap(int64_t begin, int64_t count, int64_t tile, int64_t tile_size) {
  const int64_t first = std::max(begin, tile), last = std::min(begin + count, tile + tile_size);
  return {first - begin, std::max<int64_t>(0, last - first), std::max<int64_t>(0, begin - tile)};
}

// Tiles of an image that was resized and pasted at (top, left) into the grid's picture.
void add_tiles(ImagePlan& plan, ImageSize image, ImageSize tile, ImageSize resized, int64_t top,
               int64_t left) {
  for (int64_t row = 0; row < plan.grid.rows; ++row) {
    const Centred y = overlap(top, resized.height, row * tile.height, tile.height);
    for (int64_t column = 0; column < plan.grid.columns; ++column) {
      const Centred x = overlap(left, resized.width, column * tile.width, tile.width);
      PicturePlan picture = {whole(image), resized, {}, tile};
      if (y.count > 0 && x.count > 0) {
        picture.keep = {y.first, x.first, {y.count, x.count}};
        picture.top = y.before;
        picture.left = x.before;
      }
      plan.pictures.push_back(picture);
    }
  }
}

void plan_llava_next(const ImageProcessorConfig& config, ImageSize image, ImagePlan& plan) {
  const ImageSize target = best_resolution(image, config.pinpoints);
  const ImageSize fitted = fitted_size(image, target);
  plan.grid = {target.height / config.size.height, target.width / config.size.width};
  plan.pictures.push_back(squashed(whole(image), config.size));
  add_tiles(plan, image, config.size, fitted, (target.height - fitted.height) / 2,
            (target.width - fitted.width) / 2);
}

void plan_intern_vl(const ImageProcessorConfig& config, ImageSize image, ImagePlan& plan) {
  const auto [height, width] = config.size;
  if (config.use_tiles && config.most_tiles > 1)
    plan.grid = config.area_weighted
                    ? area_weighted_grid(image, height, config.most_tiles)
                    : closest_grid(image, config.size, config.min_tiles, config.most_tiles);
  add_tiles(plan, image, config.size, {plan.grid.rows * height, plan.grid.columns * width}, 0, 0);
  if (config.use_thumbnail && plan.grid.count() > 1)
    plan.pictures.push_back(squashed(whole(image), config.size));
}

Image square_of(const ImageProcessorConfig& config, const Image& image, const ImageBox& place) {
  const int64_t side = std::max(image.height(), image.width());
  Image out({side, side});
  uint8_t colour[3];
  for (size_t c = 0; c < 3; ++c) colour[c] = static_cast<uint8_t>(255 * config.scaling.mean[c]);
  for (size_t i = 0; i < out.bytes().size(); ++i) out.bytes()[i] = colour[i % 3];
  paste(image, place.top, place.left, out);
  return out;
}

Image picture_of(const ImageProcessorConfig& config, const Image& image, const PicturePlan& plan) {
  if (plan.keep.size.pixels() == 0) return Image(plan.size, 0);
  const bool part = plan.source.size != image.size();
  const Image cut = part ? crop(image, plan.source) : Image();
  Image kept = resized(part ? cut : image, plan.resized, config.filter, plan.keep);
  if (kept.size() == plan.size) return kept;
  Image out(plan.size, 0);
  paste(kept, plan.top, plan.left, out);
  return out;
}

}  // namespace

ImagePlan plan_image(const ImageProcessorConfig& config, ImageSize image) {
  ImagePlan plan;
  switch (config.kind) {
    case Kind::kPlain:
      if (config.pad_to_square && image.height != image.width) {
        const int64_t side = std::max(image.height, image.width);
        plan.square = {(side - image.height) / 2, (side - image.width) / 2, image};
        image = {side, side};
      }
      plan.pictures.push_back(plain_picture(config, image));
      break;
    case Kind::kLlavaNext:
      plan_llava_next(config, image, plan);
      break;
    case Kind::kInternVl:
      plan_intern_vl(config, image, plan);
      break;
    case Kind::kGemma3:
      plan.pictures.push_back(squashed(whole(image), config.size));
      if (config.pan_and_scan)
        for (const ImageBox& part : pan_and_scan(image, *config.pan_and_scan))
          plan.pictures.push_back(squashed(part, config.size));
      break;
    case Kind::kQwen2Vl:
      plan.pictures.push_back(squashed(
          whole(image),
          smart_size(image, config.patch * config.merge, config.min_pixels, config.most_pixels)));
      break;
  }
  return plan;
}

std::vector<Image> process_image(const ImageProcessorConfig& config, const Image& image) {
  const ImagePlan plan = plan_image(config, image.size());
  const Image square = plan.square ? square_of(config, image, *plan.square) : Image();
  std::vector<Image> out;
  for (const PicturePlan& picture : plan.pictures)
    out.push_back(picture_of(config, plan.square ? square : image, picture));
  return out;
}

std::vector<uint8_t> patch_bytes(const Image& image, int64_t patch, int64_t merge, int64_t frames) {
  const int64_t block = patch * merge;
  MEGATRON_ASSERT(image.height() % block == 0 && image.width() % block == 0, "an image of ",
                  image.height(), "x", image.width(), " in blocks of ", block);
  std::vector<uint8_t> out;
  out.reserve(image.bytes().size() * static_cast<size_t>(frames));
  const auto add = [&](int64_t top, int64_t left) {
    for (int channel = 0; channel < 3; ++channel)
      for (int64_t frame = 0; frame < frames; ++frame)
        for (int64_t y = top; y < top + patch; ++y)
          for (int64_t x = left; x < left + patch; ++x)
            out.push_back(image.row(y)[3 * x + channel]);
  };
  for (int64_t top = 0; top < image.height(); top += block)
    for (int64_t left = 0; left < image.width(); left += block)
      for (int64_t y = 0; y < merge; ++y)
        for (int64_t x = 0; x < merge; ++x) add(top + y * patch, left + x * patch);
  return out;
}

}  // namespace megatron
