// Options of GPTs that models of other kinds do not know.
#pragma once

#include "megatron/models/model.h"

namespace megatron {

// Throws Error that names the option if it is given. `model`: "T5".
void refuse_option(bool given, const char* option, const char* model);

// Refuses those that neither T5 nor a model with retrieval knows: of the loss, of scores, latents,
// experts, depths of prediction, places of norms, and
// other units of recomputation than one layer.
void refuse_options_of_gpt(const ModelConfig& config, const char* model);

}  // namespace megatron
