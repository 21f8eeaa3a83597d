// Floating-point operations of training, counted the way Megatron-LM reports them
// (docs/performance.md).
//
// Only matrix products, forward and backward; causal attention at half its full cost. Recomputation
// is not counted.
#pragma once

#include <string>

namespace megatron {

// `products`: multiply-adds of the forward. Each is two operations, and the gradients of both
// factors cost the same again.
inline double training_flops(double products) { return 6.0 * products; }

// Peak dense bf16 FLOP/s of a GPU by its name ("NVIDIA H200"), or 0 when it is not known.
double peak_bf16_flops(const std::string& device_name);

}  // namespace megatron
