// Pixels in host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace megatron {

struct ImageSize {
  int64_t height = 0;
  int64_t width = 0;
  int64_t pixels() const { return height * width; }
  bool operator==(const ImageSize&) const = default;
};

// A rectangle of pixels.
struct ImageBox {
  int64_t top = 0;
  int64_t left = 0;
  ImageSize size;
};

// 8-bit RGB, [height, width, 3], rows without gaps. Move-only.
class Image {
 public:
  // Readers of whole vectors may read so many bytes behind the last pixel.
  static constexpr int64_t kReadableBehind = 64;

  Image() = default;
  // Not initialised: memory that nobody writes to is not taken from the system.
  explicit Image(ImageSize size);
  Image(ImageSize size, uint8_t value);

  ImageSize size() const { return size_; }
  int64_t height() const { return size_.height; }
  int64_t width() const { return size_.width; }
  int64_t row_bytes() const { return 3 * size_.width; }
  uint8_t* row(int64_t y) { return bytes_.get() + y * row_bytes(); }
  const uint8_t* row(int64_t y) const { return bytes_.get() + y * row_bytes(); }
  std::span<uint8_t> bytes() { return {bytes_.get(), byte_count()}; }
  std::span<const uint8_t> bytes() const { return {bytes_.get(), byte_count()}; }

 private:
  size_t byte_count() const { return static_cast<size_t>(3 * size_.pixels()); }

  ImageSize size_;
  std::unique_ptr<uint8_t[]> bytes_;
};

// The pixels of a rectangle that lies within the image.
Image crop(const Image& image, const ImageBox& box);

// Copies an image into another one; it must fit there.
void paste(const Image& image, int64_t top, int64_t left, Image& into);

}  // namespace megatron
