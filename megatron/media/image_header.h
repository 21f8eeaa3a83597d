// What the first bytes of an image say, without decoding and without the libraries that decode.
#pragma once

#include "megatron/media/image.h"
#include "megatron/media/media_source.h"

namespace megatron {

enum class ImageFormat { kJpeg, kPng, kWebp };

const char* name_of(ImageFormat format);

struct ImageHeader {
  ImageFormat format = ImageFormat::kJpeg;
  ImageSize stored;     // as the pixels lie in the file
  int orientation = 1;  // 1 .. 8 as EXIF numbers them (tag 0x0112)
  // An EXIF block that is cut, has another byte order than "II" and "MM", or an orientation that is
  // none: the image is taken as stored, and counted where many are read.
  bool bad_orientation = false;

  // What every later step calls the image's size.
  ImageSize size() const {
    return orientation >= 5 ? ImageSize{stored.width, stored.height} : stored;
  }
};

// JPEG, PNG and WebP, recognised by content. Throws MediaError: other formats and animated files
// (by name), files that are cut within what is looked at, and what is beyond a limit.
ImageHeader read_image_header(const MediaSource& source, const MediaLimits& limits = {});

}  // namespace megatron
