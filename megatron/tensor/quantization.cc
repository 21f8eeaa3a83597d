#include "megatron/tensor/quantization.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/detail/blas.h"
#include "megatron/tensor/detail/fp8_rows.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

Fp8Type fp8_type(at::ScalarType type) {
  MEGATRON_ASSERT(type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2, "FP8 codes of type ",
                  c10::toString(type));
  return type == at::kFloat8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
}

// [..., c] as a contiguous matrix of a type that the kernels read.
at::Tensor as_kernel_matrix(const at::Tensor& x) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)}).contiguous();
  return rows.scalar_type() == at::kDouble ? rows.to(at::kFloat) : rows;
}

uint8_t* codes_of(const at::Tensor& codes) {
  return codes.defined() ? static_cast<uint8_t*>(codes.data_ptr()) : nullptr;
}
float* floats_of(const at::Tensor& values) {
  if (!values.defined()) return nullptr;
  MEGATRON_ASSERT(values.scalar_type() == at::kFloat, "a scale of type ",
                  c10::toString(values.scalar_type()));
  return values.data_ptr<float>();
}

void check_product(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  MEGATRON_ASSERT(a.defined() && b.defined(), "a quantised product without an operand");
  check_shape("quantised operand", b.codes, {-1, a.codes.size(1)});
  const auto by_blocks = [](const QuantizedMatrix& m) {
    return m.layout == ScaleLayout::kVector128 || m.layout == ScaleLayout::kBlock128;
  };
  MEGATRON_ASSERT(a.layout == b.layout || (by_blocks(a) && by_blocks(b)),
                  "a product of operands whose scales are not of one kind");
}

bool is_emulated(const QuantizedMatrix& m) { return m.codes.scalar_type() == at::kBFloat16; }

// On the CPU and for emulated formats: products of the quantised values summed in fp32, then
// scaled.
at::Tensor plain_product(const QuantizedMatrix& a, const QuantizedMatrix& b) {
  const bool by_rows = a.layout == ScaleLayout::kRow;
  if (a.layout != ScaleLayout::kTensor && !by_rows) return at::mm(dequantize(a), dequantize(b).t());
  const at::Tensor product = a.codes.is_cuda()
                                 ? at::mm(a.codes, b.codes.t(), at::kFloat)
                                 : at::mm(a.codes.to(at::kFloat), b.codes.to(at::kFloat).t());
  if (by_rows) return product.mul_(a.scale.unsqueeze(1)).mul_(b.scale);
  return product.mul_(a.scale.select(0, kFp8InverseAt) * b.scale.select(0, kFp8InverseAt));
}

}  // namespace

at::Tensor largest_magnitude(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  const at::Tensor in = as_kernel_matrix(x);
  const at::Tensor amax = at::zeros({1}, in.options().dtype(at::kFloat));
  Amax args;
  args.dtype = to_dtype(in.scalar_type());
  args.count = in.numel();
  args.x = in.const_data_ptr();
  args.amax = floats_of(amax);
  launch(
      in, (args.count + kAmaxRun - 1) / kAmaxRun, kAmaxRun,
      [&](int64_t begin, int64_t end) { amax_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(amax_cuda(args, stream)); });
  return amax;
}

QuantizedTensor quantize_tensor(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                const TensorScale& by) {
  const at::NoGradGuard no_grad;
  const at::Tensor in = as_kernel_matrix(x);
  const at::Tensor amax = by.scale.defined() || by.amax.defined() ? by.amax : largest_magnitude(in);
  const int64_t r = in.size(0), c = in.size(1);
  const at::Tensor scale = at::empty({kFp8ScaleElements}, in.options().dtype(at::kFloat));
  QuantizedTensor out;
  if (wanted.rows)
    out.rows = {at::empty({r, c}, in.options().dtype(type)), scale, ScaleLayout::kTensor};
  if (wanted.columns)
    out.columns = {at::empty({c, r}, in.options().dtype(type)), scale, ScaleLayout::kTensor};
  Fp8Cast args;
  args.dtype = to_dtype(in.scalar_type());
  args.type = fp8_type(type);
  args.rows = r;
  args.columns = c;
  args.x = in.const_data_ptr();
  args.amax = by.scale.defined() ? nullptr : floats_of(amax);
  args.given_scale = floats_of(by.scale);
  args.new_amax = floats_of(by.new_amax);
  args.scale = floats_of(scale);
  args.in_rows = codes_of(out.rows.codes);
  args.in_columns = codes_of(out.columns.codes);
  launch(
      in, r, c, [&](int64_t begin, int64_t end) { fp8_cast_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_cast_cuda(args, stream)); });
  return out;
}

QuantizedMatrix quantize_rows_of(const at::Tensor& in, Fp8Rows args, int64_t columns) {
  args.dtype = to_dtype(in.scalar_type());
  args.rows = in.numel() / in.size(-1);
  args.columns = columns;
  args.x = in.const_data_ptr();
  const QuantizedMatrix out = {
      at::empty({args.rows, columns}, in.options().dtype(at::kFloat8_e4m3fn)),
      at::empty({args.rows}, in.options().dtype(at::kFloat)), ScaleLayout::kRow};
  args.codes = codes_of(out.codes);
  args.inverse_scales = floats_of(out.scale);
  launch(
      in, args.rows, in.size(-1),
      [&](int64_t begin, int64_t end) { fp8_rows_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_rows_cuda(args, stream)); });
  return out;
}

QuantizedMatrix quantize_rows(const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  return quantize_rows_of(as_kernel_matrix(x), {}, x.size(-1));
}

bool can_quantize_rows(const at::Tensor& x, int64_t columns) {
  return columns % 16 == 0 && columns <= kMostFp8RowColumns && x.scalar_type() != at::kDouble &&
         (!x.is_cuda() || scales_rows_of_products(x.get_device()));
}

QuantizedMatrix with_row_scales(const QuantizedMatrix& matrix) {
  MEGATRON_ASSERT(matrix.layout == ScaleLayout::kTensor, "scales of blocks as those of rows");
  return {matrix.codes,
          matrix.scale.narrow(0, kFp8InverseAt, 1).expand({matrix.codes.size(0)}).contiguous(),
          ScaleLayout::kRow};
}

at::Tensor no_scale(at::Device device) {
  return at::ones({kFp8ScaleElements}, at::dtype(at::kFloat).device(device));
}

void multiply_by_factors(const at::Tensor& y, const at::Tensor& factors, const at::Tensor& bias,
                         const at::Tensor& addend) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = y.view({factors.size(0), -1});
  RowFactors args;
  args.dtype = to_dtype(y.scalar_type());
  args.rows = rows.size(0);
  args.columns = rows.size(1);
  args.y = y.data_ptr();
  args.factors = factors.const_data_ptr<float>();
  const at::Tensor shift = bias.defined() ? bias.to(y.scalar_type()).contiguous() : bias,
                   more = addend.defined() ? addend.contiguous() : addend;
  if (shift.defined()) {
    check_shape("bias of rows with factors", shift, {args.columns});
    args.bias = shift.const_data_ptr();
  }
  if (more.defined()) {
    MEGATRON_ASSERT(more.numel() == y.numel() && more.scalar_type() == y.scalar_type(),
                    "an addend of ", more.toString(), " for ", y.toString());
    args.addend = more.const_data_ptr();
  }
  launch(
      y, args.rows, args.columns,
      [](int64_t, int64_t) { MEGATRON_ASSERT(false, "products on CPUs have scales of rows"); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(row_factors_cuda(args, stream)); });
}

QuantizedTensor quantize_blocks(const at::Tensor& x, at::ScalarType type, Orientations wanted,
                                bool square) {
  const at::NoGradGuard no_grad;
  const at::Tensor in = as_kernel_matrix(x);
  const int64_t r = in.size(0), c = in.size(1), row_blocks = r / kFp8Block,
                column_blocks = c / kFp8Block;
  MEGATRON_ASSERT(r % kFp8Block == 0 && c % kFp8Block == 0, "FP8 blocks of [", r, ", ", c, "]");
  const auto floats = in.options().dtype(at::kFloat);
  const ScaleLayout layout = square ? ScaleLayout::kBlock128 : ScaleLayout::kVector128;
  QuantizedTensor out;
  if (wanted.rows) {
    out.rows = {at::empty({r, c}, in.options().dtype(type)),
                square ? at::zeros({row_blocks, up4(column_blocks)}, floats)
                       : at::empty({column_blocks, r}, floats),
                layout};
  }
  if (wanted.columns) {
    out.columns = {at::empty({c, r}, in.options().dtype(type)),
                   square ? at::zeros({column_blocks, up4(row_blocks)}, floats)
                          : at::empty({row_blocks, c}, floats),
                   layout};
  }
  Fp8BlockCast args;
  args.dtype = to_dtype(in.scalar_type());
  args.type = fp8_type(type);
  args.square = square;
  args.rows = r;
  args.columns = c;
  args.x = in.const_data_ptr();
  args.in_rows = codes_of(out.rows.codes);
  args.in_columns = codes_of(out.columns.codes);
  args.row_scales = floats_of(out.rows.scale);
  args.column_scales = floats_of(out.columns.scale);
  launch(
      in, row_blocks, kFp8Block * c,
      [&](int64_t begin, int64_t end) { fp8_block_cast_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_block_cast_cuda(args, stream)); });
  return out;
}

at::Tensor dequantize(const QuantizedMatrix& matrix) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = matrix.codes.to(at::kFloat);
  const int64_t r = values.size(0), c = values.size(1);
  switch (matrix.layout) {
    case ScaleLayout::kTensor:
      return values * matrix.scale.select(0, kFp8InverseAt);
    case ScaleLayout::kRow:
      return values * matrix.scale.unsqueeze(1);
    case ScaleLayout::kVector128:
      return (values.view({r, c / kFp8Block, kFp8Block}) * matrix.scale.t().unsqueeze(2))
          .view({r, c});
    case ScaleLayout::kBlock128: {
      const at::Tensor scale = matrix.scale.narrow(1, 0, c / kFp8Block).unsqueeze(1).unsqueeze(3);
      return (values.view({r / kFp8Block, kFp8Block, c / kFp8Block, kFp8Block}) * scale)
          .view({r, c});
    }
  }
  throw InternalError("internal error: unknown layout of scales");
}

QuantizedTensor quantize_operand(const at::Tensor& x, OperandRole role,
                                 const QuantizationOptions& options, Orientations wanted,
                                 const TensorScale& by) {
  MEGATRON_ASSERT(options.enabled(), "an operand without a recipe");
  if (options.recipe == QuantizationRecipe::kNvfp4) return quantize_nvfp4(x, role, wanted);
  if (options.recipe == QuantizationRecipe::kBlockwise)
    return quantize_blocks(x, options.type(role), wanted, role == OperandRole::kWeight);
  return quantize_tensor(x, options.type(role), wanted, by);
}

at::Tensor quantized_product(const QuantizedMatrix& a, const QuantizedMatrix& b,
                             at::ScalarType type, const at::Tensor& bias, bool fast,
                             const at::Tensor& addend) {
  const at::Tensor out =
      at::empty({a.codes.size(0), b.codes.size(0)}, a.codes.options().dtype(type));
  quantized_product_out(a, b, out, bias, fast, addend);
  return out;
}

void quantized_product_out(const QuantizedMatrix& a, const QuantizedMatrix& b,
                           const at::Tensor& out, const at::Tensor& bias, bool fast,
                           const at::Tensor& addend) {
  const at::NoGradGuard no_grad;
  check_product(a, b);
  if (bias.defined()) check_shape("bias of a quantised product", bias, {b.codes.size(0)});
  if (a.codes.is_cuda() && !is_emulated(a))
    return blas_quantized(a, b, out, bias.defined() ? bias.to(out.scalar_type()) : bias,
                          addend.defined() ? addend.reshape(out.sizes()) : addend, 0.0, fast);
  at::Tensor product = plain_product(a, b);
  if (bias.defined()) product.add_(bias);
  if (addend.defined()) product.add_(addend.reshape(out.sizes()));
  out.copy_(product);
}

void quantized_product_into(const QuantizedMatrix& a, const QuantizedMatrix& b,
                            const at::Tensor& target, double beta) {
  const at::NoGradGuard no_grad;
  check_product(a, b);
  check_shape("target of a quantised product", target, {a.codes.size(0), b.codes.size(0)});
  MEGATRON_ASSERT(target.scalar_type() == at::kFloat && target.is_contiguous(),
                  "the target of a quantised product is fp32 and contiguous");
  if (a.codes.is_cuda() && !is_emulated(a))
    return blas_quantized(a, b, target, {}, {}, beta, /*fast=*/false);
  const at::Tensor product = plain_product(a, b);
  if (beta == 0.0) {
    target.copy_(product);
  } else {
    target.mul_(beta).add_(product);
  }
}

void update_delayed_scales(const at::Tensor& state, const at::Tensor& amax,
                           const DelayedScalingOptions& options, bool keep_unmeasured) {
  const at::NoGradGuard no_grad;
  check_shape("delayed scales", state, {amax.size(0), 1 + options.history_length});
  DelayedScaleUpdate args;
  args.slots = amax.size(0);
  args.history_length = options.history_length;
  args.most_recent = options.most_recent;
  args.keep_unmeasured = keep_unmeasured;
  args.factor = std::ldexp(1.0f, -static_cast<int>(options.margin));
  args.gradient_type = fp8_type(options.gradient_type);
  args.state = floats_of(state);
  args.amax = floats_of(amax);
  if (state.is_cuda()) {
    void* stream = current_stream(state);
    MEGATRON_CUDA_KERNEL(delayed_scale_update_cuda(args, stream));
  } else {
    delayed_scale_update_cpu(args);
  }
}

}  // namespace megatron
