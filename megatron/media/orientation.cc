#include "megatron/media/orientation.h"

#include <cstring>

#include "megatron/base/check.h"

namespace megatron {

Image oriented(Image image, int orientation) {
  MEGATRON_ASSERT(orientation >= 1 && orientation <= 8, "orientation ", orientation);
  if (orientation == 1) return image;
  const bool turned = orientation >= 5;
  // Where the source's rows and columns are read backwards.
  const bool up = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  const bool left = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const int64_t height = image.height(), width = image.width();
  Image out(turned ? ImageSize{width, height} : image.size());
  const int64_t row_step = image.row_bytes();
  const uint8_t* const first = image.row(up ? height - 1 : 0) + (left ? 3 * (width - 1) : 0);
  const int64_t down = up ? -row_step : row_step, right = left ? -3 : 3;
  const int64_t y_step = turned ? right : down, x_step = turned ? down : right;
  for (int64_t y = 0; y < out.height(); ++y) {
    const uint8_t* from = first + y * y_step;
    uint8_t* to = out.row(y);
    for (int64_t x = 0; x < out.width(); ++x, from += x_step, to += 3) std::memcpy(to, from, 3);
  }
  return out;
}

}  // namespace megatron
