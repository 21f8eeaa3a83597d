// What an encoder reads of a sound: the log-mel features of its frames.
#pragma once

#include <span>

#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/datasets/sample_sounds.h"
#include "megatron/media/media_source.h"

namespace megatron {

SampleSound sample_sound(const MediaRules& rules, const MediumFacts& medium);

// Decodes a sound and writes its features, as many as sample_sound() says. `samples`: what its
// headers say. Throws Error that begins with the source's name.
void read_frames(const MediaRules& rules, const MediaSource& source, int64_t samples,
                 const MediaLimits& limits, std::span<float> frames);

}  // namespace megatron
