// The proof that a model is served as it was trained, for `megatron prove`.
#pragma once

#include "megatron/training/proving/prove.h"

namespace megatron {

// Serves the model of `arguments` (from shrink()) in fp64 on its tensor ranks and stages, as
// threads on the CPU, and compares with the training forward of one rank. A model that cannot be
// served is in Proof::not_proved.
Proof prove_served(const PretrainTask& task, const Arguments& arguments);

}  // namespace megatron
