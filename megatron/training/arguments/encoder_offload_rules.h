// Activations of encoders of media in host memory: rules across structs.
#pragma once

#include "megatron/models/mimo/mimo_config.h"
#include "megatron/training/arguments/arguments.h"

namespace megatron {

// Whether a run keeps saved activations in host memory, of the language model or of encoders.
bool offloads_activations(const Arguments& arguments);

// --encoder-offload-modules of arguments that are else right: find_frozen_media() builds encoders.
void validate_encoder_offload(const Arguments& arguments, MimoConfig own, Violations& violations);

}  // namespace megatron
