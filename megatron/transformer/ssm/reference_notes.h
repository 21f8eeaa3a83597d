// Which parts of a model's state-space layers have no kernel on a GPU, and so run as tensor
// operations.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

// One sentence for each, over t tensor-parallel ranks; by the same rules by which ssm_kernels.h
// chooses. `scans`: the GPU and the build have the kernels of scans. `training`: backward passes
// run.
std::vector<std::string> reference_notes(const TransformerConfig& config, int64_t t,
                                         at::ScalarType type, bool scans, bool training);

}  // namespace megatron
