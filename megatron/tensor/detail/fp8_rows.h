// Shared by the functions that quantise rows with a scale for each (quantization.h).
#pragma once

#include "megatron/kernels/fp8/fp8_rows.h"
#include "megatron/tensor/quantization.h"

namespace megatron {

// Runs `args` on contiguous rows `in`, which make rows of `columns` codes; fills in what tensors
// say.
QuantizedMatrix quantize_rows_of(const at::Tensor& in, Fp8Rows args, int64_t columns);

}  // namespace megatron
