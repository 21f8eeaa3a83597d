#include "megatron/media/image.h"

#include <cstring>

#include "megatron/base/check.h"

namespace megatron {

Image::Image(ImageSize size) : size_(size) {
  MEGATRON_ASSERT(size.height > 0 && size.width > 0, "an image of ", size.height, "x", size.width);
  bytes_.reset(new uint8_t[byte_count() + kReadableBehind]);
  std::memset(bytes_.get() + byte_count(), 0, kReadableBehind);
}

Image::Image(ImageSize size, uint8_t value) : Image(size) {
  std::memset(bytes_.get(), value, byte_count());
}

Image crop(const Image& image, const ImageBox& box) {
  MEGATRON_ASSERT(box.top >= 0 && box.left >= 0 && box.top + box.size.height <= image.height() &&
                      box.left + box.size.width <= image.width(),
                  "a crop outside of the image");
  Image out(box.size);
  for (int64_t y = 0; y < out.height(); ++y)
    std::memcpy(out.row(y), image.row(box.top + y) + 3 * box.left,
                static_cast<size_t>(out.row_bytes()));
  return out;
}

void paste(const Image& image, int64_t top, int64_t left, Image& into) {
  MEGATRON_ASSERT(top >= 0 && left >= 0 && top + image.height() <= into.height() &&
                      left + image.width() <= into.width(),
                  "an image that does not fit");
  for (int64_t y = 0; y < image.height(); ++y)
    std::memcpy(into.row(top + y) + 3 * left, image.row(y), static_cast<size_t>(image.row_bytes()));
}

}  // namespace megatron
