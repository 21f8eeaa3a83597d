// The orientation of an image, as cameras and editors store it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace megatron::media {

// What an image's metadata say about its orientation. EXIF's tag counts before XMP's.
class OrientationTags {
 public:
  // An EXIF block: a TIFF header and directories, perhaps behind "Exif\0\0".
  void add_exif(std::span<const uint8_t> block);
  // An XMP packet: the first tiff:Orientation in it, as attribute or element.
  void add_xmp(std::string_view packet);

  int orientation() const;  // 1 .. 8
  bool bad() const;         // there is a tag or a block that says nothing

 private:
  std::optional<uint32_t> exif_, xmp_;
  bool bad_exif_ = false;
};

}  // namespace megatron::media
