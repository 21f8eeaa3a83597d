// Pictures as PNG files, for people to look at.
#pragma once

#include <string>

#include "megatron/media/image.h"

namespace megatron {

// The bytes of a PNG file: 8-bit RGB, compressed.
std::string png_bytes(const Image& image);

}  // namespace megatron
