// Encoders of media and projectors of which a run trains nothing.
#pragma once

#include "megatron/models/mimo/mimo_config.h"
#include "megatron/training/arguments/config/start.h"

namespace megatron {

struct TransformerConfig;

// Fills MimoConfig::frozen_*. `language`: the language model, with adapters of the modules. `own`
// keeps the rules of its fields.
void find_frozen_media(const StartConfig& start, const TransformerConfig& language,
                       MimoConfig& own);

}  // namespace megatron
