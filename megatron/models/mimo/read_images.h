// Images of data as a model with an encoder of images reads them.
#pragma once

#include <string>

#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/datasets/sample_images.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/vision/packed_images.h"

namespace megatron {

// Throws Error unless the rules of `folder` make the pictures that the model reads, and as many
// tokens as they have features.
void check_media_rules(const MediaRules& rules, const MimoConfig& own, const std::string& folder);

SeenImage seen_image(int64_t sample, const SampleImage& image, int owner = 0);

}  // namespace megatron
