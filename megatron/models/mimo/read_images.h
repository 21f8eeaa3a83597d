// Images and sounds of data as a model with encoders of them reads them.
#pragma once

#include <string>

#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/datasets/sample_images.h"
#include "megatron/datasets/sample_sounds.h"
#include "megatron/models/audio/packed_sounds.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/vision/packed_images.h"

namespace megatron {

// Throws Error unless the rules of `folder` make the pictures and the sounds that the model reads,
// and as many tokens as they have features.
void check_media_rules(const MediaRules& rules, const MimoConfig& own, const std::string& folder);

SeenImage seen_image(int64_t sample, const SampleImage& image, int owner = 0);
SeenSound seen_sound(int64_t sample, const SampleSound& sound, int owner = 0);

}  // namespace megatron
