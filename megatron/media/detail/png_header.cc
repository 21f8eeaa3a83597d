// Chunks of a PNG file.
#include "megatron/media/detail/exif.h"
#include "megatron/media/detail/header_walk.h"

namespace megatron::media {

ImageHeader read_png_header(const Bytes& file, const MediaLimits& limits) {
  constexpr std::string_view kXmp("XML:com.adobe.xmp\0\0\0", 20);  // keyword, not compressed
  ImageHeader header{.format = ImageFormat::kPng};
  OrientationTags tags;
  int64_t at = 8;
  if (!file.has(at + 4, "IHDR")) file.fail(at, "the PNG does not begin with the chunk IHDR");
  for (int chunks = 1;; ++chunks) {
    if (chunks > limits.max_chunks) file.fail(at, cat("more than ", limits.max_chunks, " chunks"));
    const int64_t length = file.big_endian(at, 4);
    if (length > 0x7fffffff) file.fail(at, cat("a PNG chunk of ", length, " bytes"));
    const int64_t content = at + 8;
    file.range(content, length + 4);  // with its checksum
    if (file.has(at + 4, "IHDR")) {
      header.stored = {file.big_endian(content + 4, 4), file.big_endian(content, 4)};
    } else if (file.has(at + 4, "acTL")) {
      file.fail(at, "animated PNG is not read; expected one image");
    } else if (file.has(at + 4, "eXIf")) {
      tags.add_exif(file.range(content, length));
    } else if (file.has(at + 4, "iTXt") && file.has(content, kXmp)) {
      const auto text = file.range(content, length);
      tags.add_xmp({reinterpret_cast<const char*>(text.data()), text.size()});
    } else if (file.has(at + 4, "IEND")) {
      break;
    }
    at = content + length + 4;
  }
  header.orientation = tags.orientation();
  header.bad_orientation = tags.bad();
  return header;
}

}  // namespace megatron::media
