// What a model with low-rank adapters trains.
#pragma once

#include <initializer_list>
#include <string_view>

#include "megatron/models/model.h"

namespace megatron {

// With adapters, freezes every parameter but them and those whose names begin with one of `heads`,
// which the model has in the place of the heads of pretraining. Without adapters nothing is frozen.
void freeze_beside_adapters(Model& model, std::initializer_list<std::string_view> heads = {});

}  // namespace megatron
