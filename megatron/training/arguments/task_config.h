// Flags of the tasks other than pretraining.
#pragma once

#include <tuple>

#include "megatron/datasets/tuning/sft_config.h"
#include "megatron/training/arguments/dpo_config.h"

namespace megatron {

// The flags of each task that has some of its own: Arguments::task<Config>().
using TaskConfigs = std::tuple<  //
    DpoConfig                    //
    >;

}  // namespace megatron
