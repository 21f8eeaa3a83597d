// A model whose layers are letters of --hybrid-layer-pattern, started from a checkpoint of a GPT: a
// layer of attention and MLP is two letters.
#pragma once

#include <vector>

#include "megatron/distributed/distributed_data_parallel.h"

namespace megatron {

// Where the checkpoint is of a GPT and `config` of a hybrid model: makes the tensors, of which
// optimizer states may be some, descriptions of what they read of it. The i-th letter of attention
// is the attention of its i-th layer, the i-th MLP or layer of experts the MLP of that; final_norm
// is final_layernorm. Throws Error if there are not as many of each as the checkpoint has layers,
// and, naming the first position, if the checkpoint's own pattern is another.
void read_as_letters(const Checkpoint& checkpoint, const TransformerConfig& config,
                     std::vector<StateTensor>& tensors);

}  // namespace megatron
