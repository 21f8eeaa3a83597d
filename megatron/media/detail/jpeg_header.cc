// Segments of a JPEG file up to its first scan.
#include "megatron/media/detail/exif.h"
#include "megatron/media/detail/header_walk.h"

namespace megatron::media {
namespace {

constexpr uint32_t kStartOfScan = 0xda, kEndOfImage = 0xd9, kApplication1 = 0xe1;

bool is_frame(uint32_t marker) {
  return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
}

// Huffman or arithmetic coding of 8-bit samples, in one or several scans.
bool is_read(uint32_t marker) { return marker <= 0xc2 || marker == 0xc9 || marker == 0xca; }

void read_frame(const Bytes& file, int64_t at, uint32_t marker, ImageHeader& header) {
  if (!is_read(marker))
    file.fail(at,
              "lossless and hierarchical JPEG are not read; expected baseline, extended or "
              "progressive");
  const uint32_t bits = file.big_endian(at + 2, 1), components = file.big_endian(at + 7, 1);
  header.stored = {file.big_endian(at + 3, 2), file.big_endian(at + 5, 2)};
  if (bits != 8) file.fail(at + 2, cat("samples have ", bits, " bits; expected 8"));
  if (components != 1 && components != 3 && components != 4)
    file.fail(at + 7, cat("the image has ", components, " components; expected 1, 3 or 4"));
}

void read_application(const Bytes& file, int64_t at, int64_t length, OrientationTags& tags) {
  constexpr std::string_view kExif("Exif\0\0", 6);
  constexpr std::string_view kXmp("http://ns.adobe.com/xap/1.0/\0", 29);
  const auto segment = file.range(at + 2, length - 2);
  const std::string_view text(reinterpret_cast<const char*>(segment.data()), segment.size());
  if (text.starts_with(kExif)) tags.add_exif(segment);
  if (text.starts_with(kXmp)) tags.add_xmp(text.substr(kXmp.size()));
}

}  // namespace

ImageHeader read_jpeg_header(const Bytes& file, const MediaLimits& limits) {
  ImageHeader header{.format = ImageFormat::kJpeg};
  OrientationTags tags;
  int64_t at = 2;
  for (int segments = 1;; ++segments) {
    if (segments > limits.max_chunks)
      file.fail(at, cat("more than ", limits.max_chunks, " segments before the first scan"));
    if (file.big_endian(at, 1) != 0xff) file.fail(at, "a JPEG marker is expected here");
    while (file.big_endian(at, 1) == 0xff) ++at;  // fill bytes
    const uint32_t marker = file.big_endian(at++, 1);
    if (marker == 0x01 || (marker >= 0xd0 && marker <= 0xd7)) continue;  // without content
    if (marker == kEndOfImage) file.fail(at, "the JPEG ends before its first scan");
    const int64_t length = file.big_endian(at, 2);
    if (length < 2) file.fail(at, cat("a JPEG segment of ", length, " bytes; expected 2 or more"));
    if (marker == kStartOfScan) break;
    if (is_frame(marker)) read_frame(file, at, marker, header);
    if (marker == kApplication1) read_application(file, at, length, tags);
    file.range(at, length);
    at += length;
  }
  if (header.stored.pixels() == 0)
    file.fail(at, "the JPEG does not tell its size before its first scan");
  header.orientation = tags.orientation();
  header.bad_orientation = tags.bad();
  return header;
}

}  // namespace megatron::media
