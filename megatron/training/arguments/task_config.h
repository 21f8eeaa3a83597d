// Flags of the tasks beyond training on text.
#pragma once

#include "megatron/datasets/sft_config.h"
#include "megatron/training/arguments/dpo_config.h"
