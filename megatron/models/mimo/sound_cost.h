// What the encoder of sounds costs a rank, and the projector of its features.
#pragma once

#include "megatron/models/common/ends_cost.h"

namespace megatron {

// Adds them to `cost`, which has what the encoder of images costs, if there is one. The worst legal
// micro-batch has the ones or the others.
void add_sounds(const ModelConfig& config, const EndsShape& shape, EndsCost& cost);

}  // namespace megatron
