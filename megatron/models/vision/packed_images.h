// The pictures of a micro-batch as an encoder of images reads them, one after another without
// padding, and where their features stand in the sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megatron/models/vision/vision_config.h"
#include "megatron/tensor/attention/unpadded_rows.h"

namespace megatron {

// What the encoder sees at once: an image, or a tile of one.
struct Picture {
  int64_t sample = 0;             // of the micro-batch, whose pictures are in the order of its text
  int64_t rows = 0, columns = 0;  // of patches
};

struct PackedImages {
  std::vector<Picture> pictures;
  // [P, 3 p^2], the patches of all pictures, elements of a patch by channel, row and column: uint8
  // pixels, or their numbers in a floating-point type.
  at::Tensor patches;
  // [3, 256] fp32: the number of each value of a channel's pixels (media/pixel_values.h); undefined
  // where patches hold numbers.
  at::Tensor pixel_values;
  // [N] int64: i s + j where feature n is row j of sample i, in the order of the features.
  at::Tensor places;
  // The rows of the encoder, in which tokens attend within their picture.
  std::shared_ptr<const UnpaddedRows> segments;
};

// Of samples of `length` tokens with placeholders: `tokens` [b, s] row by row. Throws Error for a
// picture that is not of the encoder's size, and naming the sample, both numbers and its pictures
// where its placeholders are not as many as its features.
//
// On the host; `patches` may be on any device, places and segments are made on the CPU.
PackedImages pack_images(const VisionConfig& config, std::vector<Picture> pictures,
                         at::Tensor patches, at::Tensor pixel_values,
                         std::span<const int64_t> tokens, int64_t samples, int64_t image_token);

// The same on another device.
PackedImages to_device(const PackedImages& images, at::Device device);

}  // namespace megatron
