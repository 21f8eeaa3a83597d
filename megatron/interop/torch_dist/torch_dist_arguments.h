// The arguments of a Megatron-LM checkpoint (`args`), which say what its model is.
#pragma once

#include <filesystem>
#include <string>

#include "megatron/models/model.h"
#include "megatron/tensor/sharded_tensor.h"

namespace megatron {

// The model's configuration from `args` of a checkpoint; `otherwise` for what is absent there.
// Throws Error naming an argument of a model that is not built.
TransformerConfig read_torch_dist_arguments(const std::filesystem::path& directory,
                                            const TransformerConfig& otherwise = {});

// Pickled `args` of a model, which Megatron-LM reads with --use-checkpoint-args. Throws Error
// naming a setting that Megatron-LM does not have.
std::string pickled_arguments(const ModelConfig& config, DType dtype);

}  // namespace megatron
