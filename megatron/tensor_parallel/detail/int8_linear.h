// The forward of linear layers whose weights a store for inference holds in 8 bits.
#pragma once

#include "megatron/tensor/decoding/int8_weight.h"
#include "megatron/tensor_parallel/detail/linear_state.h"

namespace megatron {

// Null: the layer multiplies with its value.
const Int8Weight* int8_weight(const LinearState& state);

// norm(x) w^T + b of the outputs of this rank. Under sequence parallelism rows are gathered.
at::Tensor int8_column_forward(const at::Tensor& x, const LinearState& state,
                               const Int8Weight& weight);
// activation(x) w^T, summed over the tensor ranks, + b + residual. `is_activated`: x is the
// activation's result.
at::Tensor int8_row_forward(const at::Tensor& x, const at::Tensor& residual,
                            const LinearState& state, const Int8Weight& weight, bool is_activated);

}  // namespace megatron
