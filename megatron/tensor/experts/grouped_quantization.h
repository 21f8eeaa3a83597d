// FP8 operands of the products of experts: rows that lie by expert, quantised expert by expert, and
// their products. An expert's result is that of a linear layer with FP8 operands
// (tensor/quantization.h) that gets its rows alone, behind which zero rows fill the last block.
// Not differentiable: the layers write their own backwards.
//
// `counts` [E], int32 or int64 on the operands' device: rows of each expert, 0 allowed. Their sum
// is at most R, the rows of the operands; rows behind the sum are not read, and what becomes of
// them is undefined.
//
// On Hopper GPUs everything runs without waiting for the device, the counts being read there.
// Elsewhere it is a loop over experts, which on a GPU waits for the counts. Results are the same in
// every run. A row's forward and input gradient by blocks depend neither on the rows around it nor
// on how the rows of an expert are divided over calls.
#pragma once

#include <ATen/core/Tensor.h>

#include "megatron/tensor/quantization.h"

namespace megatron {

// Scales of experts, strided [E] fp32, for recipes with one scale per expert.
struct ExpertScales {
  // Undefined, or 0 for an expert: the scale follows from the largest magnitude of its rows here.
  at::Tensor scale = {};
  at::Tensor new_amax = {};  // raised to the largest magnitude, unless undefined
  // [R] fp32 contiguous: the largest magnitude of each row, if it is known; rows of experts alone.
  at::Tensor row_amax = {};
};

// Quantises rows x [R, c] of experts. The result's matrices lie as follows.
//   rows.codes     [R, c]; rows behind the sum of the counts are not written
//   rows.scale     kTensor [E, kFp8ScaleElements]; kVector128 [c / 128 * R]: of every expert
//                  [c / 128, rows], behind those of the experts before
//   columns.codes  flat: of every expert [c, padded rows], behind those of the experts before;
//                  rows are padded to a multiple of options.alignment()
//   columns.scale  kTensor as above; kVector128: of every expert [padded rows / 128, c]
// c and, of blocks, R need not be multiples of anything but options.alignment() for c.
QuantizedTensor quantize_expert_rows(const at::Tensor& x, const at::Tensor& counts,
                                     OperandRole role, const QuantizationOptions& options,
                                     Orientations wanted, const ExpertScales& by = {});

// Quantises a weight of experts [E, n, k]: rows.codes [E, n, k], columns.codes [E, k, n]; scales
// kTensor [E, kFp8ScaleElements], kBlock128 [E, n / 128, k / 128] and [E, k / 128, n / 128].
QuantizedTensor quantize_expert_weight(const at::Tensor& w, const QuantizationOptions& options,
                                       Orientations wanted, const ExpertScales& by = {});

// amax_e = max(amax_e, largest magnitude of the rows of expert e); amax strided [E] fp32.
void raise_expert_amax(const at::Tensor& x, const at::Tensor& counts, const at::Tensor& amax);

// y_e = a_e b_e^T.   a: `rows` of quantised rows [R, k]; b: [E, n, k], an orientation of a weight;
// y [R, n]. `fast` as in quantized_product(); `before` as in tensor/experts/grouped_gemm.h.
void grouped_quantized_product_into(const QuantizedMatrix& a, const QuantizedMatrix& b,
                                    const at::Tensor& counts, at::Tensor y, bool fast,
                                    const at::Tensor& before = {});

// target_e = beta * target_e + dy_e^T x_e.   dy, x: `columns` of quantised rows; target [E, n, k]
// fp32; beta 0 or 1. With 0 the target is not read, and zero for an expert without rows.
void grouped_quantized_weight_grad(const QuantizedMatrix& dy, const QuantizedMatrix& x,
                                   const at::Tensor& counts, at::Tensor target, double beta);

}  // namespace megatron
