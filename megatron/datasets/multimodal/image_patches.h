// What an encoder reads of an image: the patches of its pictures.
#pragma once

#include <cstdint>
#include <span>

#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/datasets/sample_images.h"
#include "megatron/media/media_source.h"

namespace megatron {

// Patches that an encoder reads of an image; 0 of sound.
int64_t image_patches(const MediaRules& rules, const MediumFacts& medium);

SampleImage sample_image(const MediaRules& rules, const MediumFacts& medium);

// Decodes an image and writes the patches of its pictures, as many bytes as sample_image() says.
// `size`: what its headers say. Throws Error that begins with the source's name.
void read_patches(const MediaRules& rules, const MediaSource& source, ImageSize size,
                  const MediaLimits& limits, std::span<uint8_t> patches);

}  // namespace megatron
