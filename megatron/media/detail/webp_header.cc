// Chunks of a WebP file.
#include "megatron/media/detail/exif.h"
#include "megatron/media/detail/header_walk.h"

namespace megatron::media {
namespace {

ImageSize lossy_size(const Bytes& file, int64_t content) {
  if (!file.has(content + 3, "\x9d\x01\x2a"))
    file.fail(content + 3, "a VP8 start code is expected here");
  return {file.little_endian(content + 8, 2) & 0x3fff, file.little_endian(content + 6, 2) & 0x3fff};
}

ImageSize lossless_size(const Bytes& file, int64_t content) {
  if (file.big_endian(content, 1) != 0x2f) file.fail(content, "a VP8L signature is expected here");
  const uint32_t bits = file.little_endian(content + 1, 4);
  return {(bits >> 14 & 0x3fff) + 1, (bits & 0x3fff) + 1};
}

}  // namespace

ImageHeader read_webp_header(const Bytes& file, const MediaLimits& limits) {
  constexpr uint32_t kAnimation = 0x02;
  ImageHeader header{.format = ImageFormat::kWebp};
  OrientationTags tags;
  const int64_t end = 8 + static_cast<int64_t>(file.little_endian(4, 4));
  file.range(0, end);
  int64_t at = 12;
  for (int chunks = 1; at + 8 <= end; ++chunks) {
    if (chunks > limits.max_chunks) file.fail(at, cat("more than ", limits.max_chunks, " chunks"));
    const int64_t length = file.little_endian(at + 4, 4), content = at + 8;
    const auto bytes = file.range(content, length);
    const bool first = header.stored.pixels() == 0;
    if (file.has(at, "VP8X")) {
      if (file.big_endian(content, 1) & kAnimation)
        file.fail(at, "animated WebP is not read; expected one image");
      header.stored = {file.little_endian(content + 7, 3) + 1,
                       file.little_endian(content + 4, 3) + 1};
    } else if (file.has(at, "ANIM") || file.has(at, "ANMF")) {
      file.fail(at, "animated WebP is not read; expected one image");
    } else if (file.has(at, "VP8 ") && first) {
      header.stored = lossy_size(file, content);
    } else if (file.has(at, "VP8L") && first) {
      header.stored = lossless_size(file, content);
    } else if (file.has(at, "EXIF")) {
      tags.add_exif(bytes);
    } else if (file.has(at, "XMP ")) {
      tags.add_xmp({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
    at = content + length + (length & 1);
  }
  if (header.stored.pixels() == 0) file.fail(at, "the WebP holds no image");
  header.orientation = tags.orientation();
  header.bad_orientation = tags.bad();
  return header;
}

}  // namespace megatron::media
