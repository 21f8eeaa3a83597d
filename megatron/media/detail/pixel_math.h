// Integer arithmetic of single pixels, as Pillow's.
#pragma once

#include <algorithm>
#include <cstdint>

namespace megatron::media {

// a b / 255, rounded to the nearest, for a, b in 0 .. 255.
inline uint32_t times_over_255(uint32_t a, uint32_t b) {
  const uint32_t t = a * b + 128;
  return (t + (t >> 8)) >> 8;
}

// A colour laid over white: (c a + 255 (255 - a)) / 255, rounded to the nearest.
inline uint8_t over_white(uint32_t colour, uint32_t alpha) {
  const uint32_t t = colour * alpha + 255 * (255 - alpha) + 128;
  return static_cast<uint8_t>((t + (t >> 8)) >> 8);
}

// RGB of inks; 255 is all of an ink.
inline void cmyk_to_rgb(const uint8_t* cmyk, uint8_t* rgb) {
  const uint32_t light = 255u - cmyk[3];
  for (int i = 0; i < 3; ++i) {
    const int value = static_cast<int>(light) - static_cast<int>(times_over_255(cmyk[i], light));
    rgb[i] = static_cast<uint8_t>(std::max(value, 0));
  }
}

}  // namespace megatron::media
