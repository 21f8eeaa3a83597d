// What encoders compute for images and sounds, by which data divide them over ranks.
#pragma once

#include "megatron/datasets/image_plan.h"
#include "megatron/models/mimo/mimo_config.h"

namespace megatron {

// Multiply-adds of the encoder's layers: over the layers and their attention segments of s rows the
// sum of s (4 h^2 + m h f + 2 s h), f the width of an MLP, m = 2 or, of a gated one, 3. Segments
// are pictures, in layers of windows these, and clips of sounds. Three times as much where the
// encoder is trained, for its backward. Adapters and projectors are left out.
int64_t encoding_cost(const MimoConfig& own, const SampleImage& image);
int64_t encoding_cost(const MimoConfig& own, const SampleSound& sound);

// Both, of a configuration that says which encoders are frozen (training/arguments/frozen_media.h).
MediaCosts media_costs(const MimoConfig& own);

}  // namespace megatron
