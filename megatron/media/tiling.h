// How image processors divide an image, from its size alone.
#pragma once

#include <span>
#include <vector>

#include "megatron/media/image.h"

namespace megatron {

struct TileGrid {
  int64_t rows = 1;
  int64_t columns = 1;
  int64_t count() const { return rows * columns; }
  bool operator==(const TileGrid&) const = default;
};

// InternVL, and Megatron's --use-tiling: the grid of min_tiles to most_tiles tiles of size `tile`
// whose aspect is closest to the image's. Of equally close ones the first by number of tiles and
// columns; a later one replaces it if the image has more than half the pixels of its tiles.
TileGrid closest_grid(ImageSize image, ImageSize tile, int64_t min_tiles, int64_t most_tiles);

// Megatron's --use-area-weighted-aspect-ratio: the first grid with the largest product of likeness
// in aspect and covered area (at most 0.6 of the image's).
TileGrid area_weighted_grid(ImageSize image, int64_t tile, int64_t most_tiles);

// LLaVA-NeXT: the resolution out of `pinpoints` that keeps most pixels of the image, of those the
// one that wastes least, of those the first.
ImageSize best_resolution(ImageSize image, std::span<const ImageSize> pinpoints);

// The image scaled so that it just fits into `into`.
ImageSize fitted_size(ImageSize image, ImageSize into);

// Of a map of features of a padded image, what shows the image: rows [top, top + height) and
// columns [left, left + width). May be empty.
ImageBox unpadded_map(ImageSize image, ImageSize map);

// Tokens of an image in LLaVA-NeXT, whose tile gives side x side features: those of the whole
// image, and of each remaining row of the grid's map its features and one end of row.
int64_t llava_next_tokens(ImageSize image, std::span<const ImageSize> pinpoints, int64_t tile,
                          int64_t side);

// Qwen 2-VL: sides that are multiples of `factor` (halves round to even) and a number of pixels
// within the limits. Throws Error if a side is more than 200 times the other one.
ImageSize smart_size(ImageSize image, int64_t factor, int64_t min_pixels, int64_t most_pixels);

// Gemma 3: pictures along the longer side, beside the whole image; none for images that are nearly
// square or would be cut too small.
struct PanAndScan {
  int64_t min_crop = 256;
  int64_t most_crops = 4;
  double from_ratio = 1.2;
};
std::vector<ImageBox> pan_and_scan(ImageSize image, const PanAndScan& options);

}  // namespace megatron
