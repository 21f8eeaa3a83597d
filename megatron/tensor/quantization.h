// FP8 operands of matrix products: rounding, scales, products. Not differentiable: the layers write
// their own backwards. On CUDA the products are cuBLASLt's FP8 products; on the CPU the same codes
// are multiplied in fp32. No function waits for the device.
#pragma once

#include "megatron/tensor/activation.h"
#include "megatron/tensor/norm.h"
#include "megatron/tensor/quantization_options.h"

namespace megatron {

enum class ScaleLayout : uint8_t { kTensor, kVector128, kBlock128 };

// A matrix in codes, contiguous, and the inverse of what its values were multiplied with.
struct QuantizedMatrix {
  at::Tensor codes;  // [rows, columns], FP8; bf16 for NVFP4
  // kTensor     [kFp8ScaleElements] fp32: the scale, and its inverse at kFp8InverseAt
  // kVector128  [columns / 128, rows] fp32, inverse
  // kBlock128   [rows / 128, columns / 128 rounded up to 4] fp32, inverse
  at::Tensor scale;
  ScaleLayout layout = ScaleLayout::kTensor;
  bool defined() const { return codes.defined(); }
};

// One matrix ready to be summed over its columns (`rows`) or over its rows (`columns`: transposed).
struct QuantizedTensor {
  QuantizedMatrix rows;     // [r, c]
  QuantizedMatrix columns;  // [c, r]
};

// Which of the two a caller needs.
struct Orientations {
  bool rows = true;
  bool columns = true;
};

// The largest |x|, [1] fp32; NaN does not count.
at::Tensor largest_magnitude(const at::Tensor& x);

// x [..., c] as a matrix [r, c] with one scale. The scale is the given one, [1] or longer fp32 of
// which the first counts (1 where it is 0), or follows from `amax` [1] or, with neither, from x
// itself. With `new_amax` [1] also raises it to the largest |x|.
struct TensorScale {
  at::Tensor scale = {}, amax = {}, new_amax = {};
};
QuantizedTensor quantize_tensor(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                const TensorScale& by = {});

// With a power of two for each block; `square` for weights: 128 x 128, else 128 along the sum,
// which differs between the two orientations.
QuantizedTensor quantize_blocks(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                bool square);

// NVFP4, emulated: `codes` are bf16 values of E2M1 times E4M3, which hold them exactly; the scale
// is the tensor's. Blocks of 16 along the sum, 16 x 16 of a weight. Input and gradient are summed
// over rows in a basis that spreads outliers (a Hadamard transform of 16 neighbours, the same for
// both), and gradients are rounded at random, by a hash of place and value: the same bits in every
// run.
QuantizedTensor quantize_nvfp4(const at::Tensor& x, OperandRole role, Orientations wanted);

// One of the three above, as the recipe of `options` asks for an operand of that role; `by` where
// it has one scale.
QuantizedTensor quantize_operand(const at::Tensor& x, OperandRole role,
                                 const QuantizationOptions& options, Orientations wanted,
                                 const TensorScale& by = {});

// The codes of activate(x), or with `dy` of its gradient (activation_backward), without the tensor
// itself; the same bits as in two steps. Gated activations, by a scale that is given, or with no
// scale by blocks of 128.
QuantizedTensor quantize_activation(const at::Tensor& x, const at::Tensor& dy,
                                    Activation activation, double offset, at::ScalarType type,
                                    Orientations wanted, const TensorScale& by);

// The codes of a norm's result, without the tensor itself, and the statistics; the same bits as in
// two steps. By a scale that is given, where can_quantize_norm(x).
struct QuantizedNorm {
  QuantizedTensor codes;
  at::Tensor mean, rstd;  // as of NormResult
};
bool can_quantize_norm(const at::Tensor& x);
QuantizedNorm quantize_norm(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps, bool zero_centered,
                            at::ScalarType type, Orientations wanted, const TensorScale& by);

// The values that the codes stand for, fp32.
at::Tensor dequantize(const QuantizedMatrix& matrix);

// a b^T (+ bias) (+ addend).   a [m, k], b [n, k], bias [n] and addend [..., n] in `type` or
// undefined; returns [m, n] in `type`, rounded once. `fast`: sums in the tensor cores' own width
// (about 14 bits) as far as they reach, which Transformer Engine takes for forward products; else
// in fp32 throughout. The CPU always sums in fp32.
at::Tensor quantized_product(const QuantizedMatrix& a, const QuantizedMatrix& b,
                             at::ScalarType type, const at::Tensor& bias, bool fast,
                             const at::Tensor& addend = {});

// target = beta * target + a b^T.   target [m, n] fp32, contiguous.
void quantized_product_into(const QuantizedMatrix& a, const QuantizedMatrix& b,
                            const at::Tensor& target, double beta);

// The end of a step for `state` [slots, 1 + history] and `amax` [slots], three slots to a weight.
void update_delayed_scales(const at::Tensor& state, const at::Tensor& amax,
                           const DelayedScalingOptions& options);

}  // namespace megatron
