// Reading of numbers from a file's header: every access is checked.
#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>

#include "megatron/media/image_header.h"

namespace megatron::media {

// A range of a medium's bytes. Offsets are those of the file; reading behind the end throws
// MediaError.
class Bytes {
 public:
  explicit Bytes(const MediaSource& source) : source_(&source) {}

  int64_t size() const { return static_cast<int64_t>(source_->bytes.size()); }
  std::span<const uint8_t> range(int64_t offset, int64_t count) const {
    if (offset < 0 || count < 0 || offset > size() || count > size() - offset)
      fail(size(),
           cat("the file is cut: it ends where ", count, " bytes at ", offset, " are expected"));
    return source_->bytes.subspan(static_cast<size_t>(offset), static_cast<size_t>(count));
  }
  uint32_t big_endian(int64_t offset, int count) const {
    uint32_t value = 0;
    for (const uint8_t byte : range(offset, count)) value = value << 8 | byte;
    return value;
  }
  uint32_t little_endian(int64_t offset, int count) const {
    uint32_t value = 0;
    const auto bytes = range(offset, count);
    for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | bytes[i];
    return value;
  }
  // Whether the text stands there; false where the file ends before.
  bool has(int64_t offset, std::string_view text) const {
    const auto bytes = source_->bytes;
    const auto begin = static_cast<size_t>(offset);
    return offset >= 0 && begin <= bytes.size() && text.size() <= bytes.size() - begin &&
           std::memcmp(bytes.data() + begin, text.data(), text.size()) == 0;
  }
  [[noreturn]] void fail(int64_t offset, const std::string& text) const {
    throw_media_error(*source_, offset, text);
  }

 private:
  const MediaSource* source_;
};

// Headers of the formats; the number of pixels is checked by read_image_header().
ImageHeader read_jpeg_header(const Bytes& file, const MediaLimits& limits);
ImageHeader read_png_header(const Bytes& file, const MediaLimits& limits);
ImageHeader read_webp_header(const Bytes& file, const MediaLimits& limits);

}  // namespace megatron::media
