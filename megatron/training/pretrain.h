// The training loop: Megatron's pretrain().
#pragma once

#include "megatron/training/run_origin.h"
#include "megatron/training/setup.h"

namespace megatron {

// Trains (or only evaluates) according to the arguments: groups, tokenizer, datasets, model,
// optimizer, checkpoint, the loop, final evaluation. Every rank of the job calls it. Returns the
// exit code: 0 if the run ended as configured or was stopped by a first signal. `libraries`:
// versions, for the "start" record of metrics.jsonl. Throws Error.
int pretrain(const PretrainTask& task, const Arguments& arguments, const Job& job = {},
             const Versions& libraries = {});

}  // namespace megatron
