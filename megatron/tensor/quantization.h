// FP8 operands of matrix products: rounding, scales, products. Not differentiable: the layers write
// their own backwards. On CUDA the products are cuBLASLt's FP8 products; on the CPU the same
// quantised values are multiplied in fp32. No function synchronises with the device.
#pragma once

#include "megatron/tensor/activation.h"
#include "megatron/tensor/norm.h"
#include "megatron/tensor/quantization_options.h"

namespace megatron {

enum class ScaleLayout : uint8_t { kTensor, kRow, kVector128, kBlock128 };

// A quantised matrix, contiguous, and the inverse of its scales.
struct QuantizedMatrix {
  at::Tensor codes;  // [rows, columns], FP8; bf16 for NVFP4
  // kTensor     [kFp8ScaleElements] fp32: the scale, and its inverse at kFp8InverseAt
  // kRow        [rows] fp32, inverse
  // kVector128  [columns / 128, rows] fp32, inverse
  // kBlock128   [rows / 128, columns / 128 rounded up to 4] fp32, inverse
  at::Tensor scale;
  ScaleLayout layout = ScaleLayout::kTensor;
  bool defined() const { return codes.defined(); }
};

// One matrix quantised for sums over its columns (`rows`) and over its rows (`columns`:
// transposed).
struct QuantizedTensor {
  QuantizedMatrix rows;     // [r, c]
  QuantizedMatrix columns;  // [c, r]
};

// Which of the two orientations a caller needs.
struct Orientations {
  bool rows = true;
  bool columns = true;
};

// The amax: largest |x|, [1] fp32; NaN is ignored.
at::Tensor largest_magnitude(const at::Tensor& x);

// Quantises x [..., c] as a matrix [r, c] with one scale: the given one, [1] or longer fp32, of
// which the first element counts (1 if it is 0), or computed from `amax` [1] or, with neither, from
// x itself. With `new_amax` [1] also raises it to the largest |x|.
struct TensorScale {
  at::Tensor scale = {}, amax = {}, new_amax = {};
};
QuantizedTensor quantize_tensor(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                const TensorScale& by = {});

// Rows of E4M3 with a scale for each, that of its largest |x|, in one pass: of x [..., c]; of a
// norm of x; of a gated activation of x [..., 2 c]. Equal, but for the order in which a norm adds
// up, to two steps.
QuantizedMatrix quantize_rows(const at::Tensor& x);
QuantizedMatrix quantize_norm_rows(Normalization kind, const at::Tensor& x,
                                   const at::Tensor& weight, const at::Tensor& bias, double eps,
                                   bool zero_centered);
// `factors` [rows] or undefined: powers of two by which rows of x are multiplied first, on GPUs.
QuantizedMatrix quantize_activation_rows(const at::Tensor& x, Activation activation, double offset,
                                         const at::Tensor& factors = {});
// Whether products of matrices with a scale for each row run on the device of `x`, whose kernels
// hold rows of so many columns: CPUs and GPUs of compute capability 9.0.
bool can_quantize_rows(const at::Tensor& x, int64_t columns);
// A matrix with one scale as one with a scale for each row, for products with such.
QuantizedMatrix with_row_scales(const QuantizedMatrix& matrix);
// The scale 1 of a matrix with one scale.
at::Tensor no_scale(at::Device device);
// y [rows, columns] = y * factors [rows] (+ bias [columns]) (+ addend, shaped as y), each undefined
// or of y's type: see RowFactors in kernels/fp8/fp8_rows.h.
void multiply_by_factors(const at::Tensor& y, const at::Tensor& factors, const at::Tensor& bias,
                         const at::Tensor& addend);

// Quantises with a power-of-two scale per block: 128 x 128 if `square` (weights), else 128 along
// the summed dimension, which differs between the two orientations.
QuantizedTensor quantize_blocks(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                bool square);

// NVFP4, emulated: `codes` are bf16 values of E2M1 times E4M3, which hold them exactly; the scale
// is the tensor's. Blocks of 16 along the summed dimension, 16 x 16 of a weight. For sums over
// rows, input and gradient are rotated by a Hadamard transform of 16 consecutive rows, which
// spreads outliers. Gradients are rounded stochastically, by a hash of position and value: the same
// bits in every run.
QuantizedTensor quantize_nvfp4(const at::Tensor& x, OperandRole role, Orientations wanted);

// One of the three above, according to the recipe of `options` for an operand of that role; `by` is
// used for recipes with one scale.
QuantizedTensor quantize_operand(const at::Tensor& x, OperandRole role,
                                 const QuantizationOptions& options, Orientations wanted,
                                 const TensorScale& by = {});

// Quantises activate(x), or with `dy` its gradient (activation_backward), without writing the
// tensor itself; bit-equal to two steps. Gated activations only, with a given scale, or without one
// by blocks of 128.
QuantizedTensor quantize_activation(const at::Tensor& x, const at::Tensor& dy,
                                    Activation activation, double offset, at::ScalarType type,
                                    Orientations wanted, const TensorScale& by);

// A norm's result in quantised form only, and the statistics; bit-equal to two steps. With a given
// scale, if can_quantize_norm(x).
struct QuantizedNorm {
  QuantizedTensor codes;
  at::Tensor mean, rstd;  // as in NormResult
};
bool can_quantize_norm(const at::Tensor& x);
QuantizedNorm quantize_norm(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps, bool zero_centered,
                            at::ScalarType type, Orientations wanted, const TensorScale& by);

// The dequantised values, fp32.
at::Tensor dequantize(const QuantizedMatrix& matrix);

// a b^T (+ bias) (+ addend). a [m, k], b [n, k], bias [n] and addend [..., n] in `type` or
// undefined; returns [m, n] in `type`, rounded once. `fast`: partial sums use the tensor cores'
// reduced precision (about 14 bits), as Transformer Engine does for forward products; else fp32
// accumulation throughout. The CPU always sums in fp32.
at::Tensor quantized_product(const QuantizedMatrix& a, const QuantizedMatrix& b,
                             at::ScalarType type, const at::Tensor& bias, bool fast,
                             const at::Tensor& addend = {});
// The same, written to `out` [m, n], contiguous.
void quantized_product_out(const QuantizedMatrix& a, const QuantizedMatrix& b,
                           const at::Tensor& out, const at::Tensor& bias, bool fast,
                           const at::Tensor& addend = {});

// target = beta * target + a b^T.   target [m, n] fp32, contiguous.
void quantized_product_into(const QuantizedMatrix& a, const QuantizedMatrix& b,
                            const at::Tensor& target, double beta);

// End of a step of delayed scaling for `state` [slots, 1 + history] and `amax` [slots], three slots
// per weight. `keep_unmeasured`: a slot whose amax is 0 stays as it is (an expert without rows).
void update_delayed_scales(const at::Tensor& state, const at::Tensor& amax,
                           const DelayedScalingOptions& options, bool keep_unmeasured = false);

}  // namespace megatron
