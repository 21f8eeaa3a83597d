// Adapters of modules beside a language model: encoders and projectors of media. Their targets in
// --lora-targets begin with the module: vision_model.linear_q, vision_projection.linear_fc1; the
// one linear of an affine projector is linear_fc1. Targets without are of the language model.
#pragma once

#include <string_view>

#include "megatron/transformer/config/lora.h"

namespace megatron {

// Whether a target is one of such a module.
bool names_module(std::string_view target);

// Gives `part` the targets of `from` that begin with `module` ("vision_model."), without it, to be
// expanded; rank 0 if there are none.
void take_adapters(const LoraConfig& from, std::string_view module, LoraConfig& part);

}  // namespace megatron
