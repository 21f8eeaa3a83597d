// From the bytes of an image file to pixels.
#pragma once

#include "megatron/media/image.h"
#include "megatron/media/image_header.h"

namespace megatron {

// What becomes of pixels that are not opaque.
enum class Transparency {
  kWhite,  // laid over white, rounded to the nearest
  kDrop,   // the stored colour, whatever the alpha
};

struct DecodeOptions {
  MediaLimits limits;
  Transparency transparency = Transparency::kWhite;
};

// 8-bit RGB, turned as the file's orientation says: the bytes of Pillow 12.3 (but for 16-bit gray,
// of which the high byte is kept, where Pillow makes everything above 255 white). Colour profiles
// and gamma are ignored. JPEG and WebP are decoded with smooth upsampling of chroma, CMYK is taken
// as inverted (Adobe's way) and converted as Pillow does. Loads libmegatron_media.so when first
// called; throws MediaError for bad media, Error if the library is not there. Thread safe.
Image decode_image(const MediaSource& source, const DecodeOptions& options = {});

}  // namespace megatron
