#include "megatron/media/pixel_values.h"

namespace megatron {

PixelTable pixel_table(const PixelScaling& scaling) {
  PixelTable table;
  for (size_t channel = 0; channel < 3; ++channel) {
    const auto mean = static_cast<float>(scaling.mean[channel]);
    const auto deviation = static_cast<float>(scaling.deviation[channel]);
    for (int v = 0; v < 256; ++v)
      table[channel][v] = (static_cast<float>(v * scaling.scale) - mean) / deviation;
  }
  return table;
}

}  // namespace megatron
