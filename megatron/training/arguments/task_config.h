// Flags of the tasks other than pretraining.
#pragma once

#include "megatron/datasets/sft_config.h"
#include "megatron/training/arguments/dpo_config.h"
