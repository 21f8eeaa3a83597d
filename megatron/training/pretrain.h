// The training loop: the seam that Megatron users know as pretrain().
#pragma once

#include "megatron/training/run_origin.h"
#include "megatron/training/setup.h"

namespace megatron {

// Trains (or only evaluates) as the arguments say: groups, tokenizer, datasets, model, optimizer,
// checkpoint, the loop, final evaluation. Every rank of the job calls it. Returns the exit code: 0
// when the run ended as configured or was stopped by a first signal. `libraries`: versions, for the
// record of the start. Throws Error.
int pretrain(const PretrainTask& task, const Arguments& arguments, const Job& job = {},
             const Versions& libraries = {});

}  // namespace megatron
