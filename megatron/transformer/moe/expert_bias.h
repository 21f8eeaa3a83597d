// The bias that balances experts without a loss (--moe-router-enable-expert-bias).
//
// Source: Wang et al. 2024 (arXiv:2408.15664). Megatron-LM moves the bias in skipped steps too.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// bias_e += rate sign(mean(counts) - counts_e), sign(0) = 0; nothing if the step was skipped.
//   bias     [E] fp32, changed in place
//   counts   [E] integers: assignments of the step over all ranks that hold tokens of it
//   skipped  [] int64, 1 if the step changed no weight, else 0; read on the device
void update_expert_bias(at::Tensor bias, const at::Tensor& counts, double rate,
                        const at::Tensor& skipped);

}  // namespace megatron
