// From bytes of pixels to the numbers that an encoder reads.
#pragma once

#include <array>

#include "megatron/media/image.h"

namespace megatron {

// What an image processor's configuration says, per channel.
struct PixelScaling {
  double scale = 1.0 / 255;  // rescale_factor
  std::array<double, 3> mean = {0.5, 0.5, 0.5};
  std::array<double, 3> deviation = {0.5, 0.5, 0.5};
};

inline constexpr PixelScaling kClipScaling = {.mean = {0.48145466, 0.4578275, 0.40821073},
                                              .deviation = {0.26862954, 0.26130258, 0.27577711}};
inline constexpr PixelScaling kImageNetScaling = {.mean = {0.485, 0.456, 0.406},
                                                  .deviation = {0.229, 0.224, 0.225}};

// The value of each byte, [channel][byte]: (float(v scale) - mean) / deviation, where the product
// is taken in double and the rest in single precision, as transformers does on NumPy arrays. Pixels
// travel as bytes and become numbers by this table alone.
using PixelTable = std::array<std::array<float, 256>, 3>;
PixelTable pixel_table(const PixelScaling& scaling);

}  // namespace megatron
