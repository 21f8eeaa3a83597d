// Resizing with Pillow's filters, to the same bytes.
#pragma once

#include <optional>

#include "megatron/media/image.h"

namespace megatron {

// With the numbers that image processors' configurations use.
enum class Resampling { kLanczos = 1, kBilinear = 2, kBicubic = 3, kBox = 4, kHamming = 5 };

// `image` resized to `size`, or of that the rectangle `keep`, which lies within it: only what that
// takes is computed. In integers with 22 fractional bits; the first pass, along the rows, is
// rounded to 8 bits, the second goes along the columns; an axis that keeps its size is not
// filtered. Images more than 100 times as high as wide that become lower take the columns first.
// These are the bytes of Image.resize of Pillow 12.3 (13.0 takes the columns first in more cases).
Image resized(const Image& image, ImageSize size, Resampling filter,
              std::optional<ImageBox> keep = std::nullopt);

}  // namespace megatron
