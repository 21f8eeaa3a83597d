#include "megatron/media/tiling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "megatron/base/check.h"

namespace megatron {
namespace {

double real(int64_t n) { return static_cast<double>(n); }

// Grids by number of tiles, then columns.
std::vector<TileGrid> grids(int64_t min_tiles, int64_t most_tiles) {
  std::vector<TileGrid> out;
  for (int64_t count = std::max<int64_t>(1, min_tiles); count <= most_tiles; ++count)
    for (int64_t columns = 1; columns <= count; ++columns)
      if (count % columns == 0) out.push_back({count / columns, columns});
  return out;
}

// To the integer below, but up to one that is nearer than 5e-8.
int64_t floor_with_slack(double x) {
  const double nearest = std::nearbyint(x);
  return static_cast<int64_t>(std::abs(x - nearest) < 5e-8 ? nearest : std::floor(x));
}

}  // namespace

TileGrid closest_grid(ImageSize image, ImageSize tile, int64_t min_tiles, int64_t most_tiles) {
  const double aspect = real(image.width) / real(image.height);
  double least = std::numeric_limits<double>::infinity();
  TileGrid best;
  for (const TileGrid& grid : grids(min_tiles, most_tiles)) {
    const double difference = std::abs(aspect - real(grid.columns) / real(grid.rows));
    if (difference < least) {
      least = difference;
      best = grid;
    } else if (difference == least &&
               real(image.pixels()) > 0.5 * real(tile.pixels() * grid.count())) {
      best = grid;
    }
  }
  return best;
}

TileGrid area_weighted_grid(ImageSize image, int64_t tile, int64_t most_tiles) {
  const double aspect = real(image.width) / real(image.height);
  double most = -1;
  TileGrid best;
  for (const TileGrid& grid : grids(1, most_tiles)) {
    const double ratio = real(grid.columns) / real(grid.rows);
    const double area = std::min(real(grid.count() * tile * tile) / real(image.pixels()), 0.6);
    const double likeness = std::min(ratio / aspect, aspect / ratio);
    if (area * likeness > most) {
      most = area * likeness;
      best = grid;
    }
  }
  return best;
}

ImageSize best_resolution(ImageSize image, std::span<const ImageSize> pinpoints) {
  MEGATRON_CHECK(!pinpoints.empty(), "no image_grid_pinpoints; expected one at least");
  int64_t most = 0, least_waste = std::numeric_limits<int64_t>::max();
  ImageSize best;
  for (const ImageSize& size : pinpoints) {
    const double scale =
        std::min(real(size.width) / real(image.width), real(size.height) / real(image.height));
    const auto width = static_cast<int64_t>(real(image.width) * scale);
    const auto height = static_cast<int64_t>(real(image.height) * scale);
    const int64_t kept = std::min(width * height, image.pixels());
    const int64_t waste = size.pixels() - kept;
    if (kept > most || (kept == most && waste < least_waste)) {
      most = kept;
      least_waste = waste;
      best = size;
    }
  }
  return best;
}

ImageSize fitted_size(ImageSize image, ImageSize into) {
  const double by_width = real(into.width) / real(image.width);
  const double by_height = real(into.height) / real(image.height);
  if (by_width < by_height) {
    const auto height = static_cast<int64_t>(std::ceil(real(image.height) * by_width));
    return {std::min(height, into.height), into.width};
  }
  const auto width = static_cast<int64_t>(std::ceil(real(image.width) * by_height));
  return {into.height, std::min(width, into.width)};
}

ImageBox unpadded_map(ImageSize image, ImageSize map) {
  if (real(image.width) / real(image.height) > real(map.width) / real(map.height)) {
    const int64_t height =
        floor_with_slack(real(image.height) * (real(map.width) / real(image.width)));
    const int64_t top = (map.height - height) / 2;
    return {top, 0, {map.height - 2 * top, map.width}};
  }
  const int64_t width =
      floor_with_slack(real(image.width) * (real(map.height) / real(image.height)));
  const int64_t left = (map.width - width) / 2;
  return {0, left, {map.height, map.width - 2 * left}};
}

int64_t llava_next_tokens(ImageSize image, std::span<const ImageSize> pinpoints, int64_t tile,
                          int64_t side) {
  const ImageSize size = best_resolution(image, pinpoints);
  const ImageSize map = {size.height / tile * side, size.width / tile * side};
  const ImageSize kept = unpadded_map(image, map).size;
  return side * side + kept.height * (kept.width + 1);
}

ImageSize smart_size(ImageSize image, int64_t factor, int64_t min_pixels, int64_t most_pixels) {
  const auto [height, width] = image;
  MEGATRON_CHECK(real(std::max(height, width)) / real(std::min(height, width)) <= 200,
                 "the image is ", height, "x", width,
                 "; expected no side to be more than 200 times the other one");
  const double f = real(factor);
  const auto multiple = [&](double parts) { return factor * static_cast<int64_t>(parts); };
  // Halves to even, the rounding mode that programs start with.
  ImageSize out = {multiple(std::nearbyint(real(height) / f)),
                   multiple(std::nearbyint(real(width) / f))};
  if (out.pixels() > most_pixels) {
    const double beta = std::sqrt(real(image.pixels()) / real(most_pixels));
    out = {std::max(factor, multiple(std::floor(real(height) / beta / f))),
           std::max(factor, multiple(std::floor(real(width) / beta / f)))};
  } else if (out.pixels() < min_pixels) {
    const double beta = std::sqrt(real(min_pixels) / real(image.pixels()));
    out = {multiple(std::ceil(real(height) * beta / f)),
           multiple(std::ceil(real(width) * beta / f))};
  }
  return out;
}

std::vector<ImageBox> pan_and_scan(ImageSize image, const PanAndScan& options) {
  const bool wide = image.width >= image.height;
  const int64_t longer = wide ? image.width : image.height;
  const int64_t shorter = wide ? image.height : image.width;
  const double ratio = real(longer) / real(shorter);
  if (ratio < options.from_ratio) return {};
  int64_t count =
      std::min(longer / options.min_crop, static_cast<int64_t>(std::floor(ratio + 0.5)));
  count = std::min(options.most_crops, std::max<int64_t>(2, count));
  const int64_t length = (longer + count - 1) / count;
  if (std::min(length, shorter) < options.min_crop) return {};
  std::vector<ImageBox> out;
  for (int64_t begin = 0; begin < longer; begin += length) {
    const int64_t size = std::min(length, longer - begin);
    out.push_back(wide ? ImageBox{0, begin, {shorter, size}} : ImageBox{begin, 0, {size, shorter}});
  }
  return out;
}

}  // namespace megatron
