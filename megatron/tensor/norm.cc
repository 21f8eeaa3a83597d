#include "megatron/tensor/norm.h"

#include "megatron/base/check.h"
#include "megatron/kernels/fp8/fp8_norm.h"
#include "megatron/kernels/norm.h"
#include "megatron/tensor/detail/fp8_rows.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/detail/partial_sum.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Gain and bias as the kernels read them, in the type of x or in the accumulation type; copies only
// if needed.
struct Weights {
  at::Tensor gain, bias;
  bool as_x;

  Weights(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& b) {
    const auto as_it_is = [&](const at::Tensor& t) {
      return !t.defined() || (t.scalar_type() == x.scalar_type() && t.is_contiguous() &&
                              reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0);
    };
    as_x = as_it_is(weight) && as_it_is(b);
    const at::ScalarType type = as_x ? x.scalar_type() : accumulate_type(x);
    gain = as_contiguous(weight, type);
    if (b.defined()) bias = as_contiguous(b, type);
  }
};

// Fills in all but mean and rstd; the tensors must outlive the result. y may be undefined.
NormForward forward_args(Normalization kind, const at::Tensor& x, const Weights& weights,
                         bool zero_centered, const at::Tensor& y) {
  NormForward args;
  args.layer_norm = kind == Normalization::kLayerNorm;
  args.dtype = to_dtype(x.scalar_type());
  args.columns = x.size(-1);
  args.rows = x.numel() / args.columns;
  args.x = x.const_data_ptr();
  args.zero_centered = zero_centered;
  args.weights_as_x = weights.as_x;
  args.gain = weights.gain.const_data_ptr();
  args.bias = weights.bias.defined() ? weights.bias.const_data_ptr() : nullptr;
  args.y = y.defined() ? y.data_ptr() : nullptr;
  return args;
}

// Allocates the statistics' tensors and sets them in `args`.
void add_statistics(const at::Tensor& x, NormForward& args, at::Tensor& mean, at::Tensor& rstd) {
  const auto options = x.options().dtype(accumulate_type(x));
  rstd = at::empty({args.rows}, options);
  args.rstd = rstd.data_ptr();
  if (!args.layer_norm) return;
  mean = at::empty({args.rows}, options);
  args.mean = mean.data_ptr();
}

void run_forward(const at::Tensor& x, const NormForward& args) {
  launch(
      x, args.rows, args.columns,
      [&](int64_t begin, int64_t end) { norm_forward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(norm_forward_cuda(args, stream)); });
}

void check_vectors(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  MEGATRON_ASSERT(x.dim() >= 1 && x.size(-1) > 0, "norm of a tensor without features");
  check_shape("norm weight", weight, {x.size(-1)});
  if (bias.defined()) check_shape("norm bias", bias, {x.size(-1)});
}

}  // namespace

NormResult norm_forward(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias, double eps, bool zero_centered,
                        const at::Tensor& amax) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, bias);
  const at::Tensor in = x.contiguous();
  const Weights weights(x, weight, bias);
  NormResult result;
  result.y = at::empty_like(in);
  NormForward args = forward_args(kind, in, weights, zero_centered, result.y);
  args.eps = eps;
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  add_statistics(in, args, result.mean, result.rstd);
  run_forward(in, args);
  return result;
}

bool can_quantize_norm(const at::Tensor& x) {
  const int64_t columns = x.size(-1);
  return x.scalar_type() != at::kDouble && columns % 16 == 0 && x.numel() / columns % 16 == 0;
}

QuantizedNorm quantize_norm(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, double eps, bool zero_centered,
                            at::ScalarType type, Orientations wanted, const TensorScale& by) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, bias);
  MEGATRON_ASSERT(can_quantize_norm(x) && by.scale.defined(),
                  "quantised output of a norm without a scale");
  const at::Tensor in = x.contiguous();
  const Weights weights(x, weight, bias);
  QuantizedNorm result;
  Fp8Norm args;
  args.norm = forward_args(kind, in, weights, zero_centered, {});
  args.norm.eps = eps;
  add_statistics(in, args.norm, result.mean, result.rstd);
  const int64_t r = args.norm.rows, c = args.norm.columns;
  const at::Tensor scale = at::empty({kFp8ScaleElements}, in.options().dtype(at::kFloat));
  const auto codes = in.options().dtype(type);
  result.codes.rows = {at::empty({r, c}, codes), scale, ScaleLayout::kTensor};
  if (wanted.columns)
    result.codes.columns = {at::empty({c, r}, codes), scale, ScaleLayout::kTensor};
  args.type = type == at::kFloat8_e5m2 ? Fp8Type::kE5M2 : Fp8Type::kE4M3;
  args.given_scale = by.scale.const_data_ptr<float>();
  if (by.new_amax.defined()) args.new_amax = by.new_amax.data_ptr<float>();
  args.scale = scale.data_ptr<float>();
  args.in_rows = static_cast<uint8_t*>(result.codes.rows.codes.data_ptr());
  if (wanted.columns)
    args.in_columns = static_cast<uint8_t*>(result.codes.columns.codes.data_ptr());
  launch(
      in, r, 2 * c, [&](int64_t begin, int64_t end) { fp8_norm_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fp8_norm_cuda(args, stream)); });
  return result;
}

QuantizedMatrix quantize_norm_rows(Normalization kind, const at::Tensor& x,
                                   const at::Tensor& weight, const at::Tensor& bias, double eps,
                                   bool zero_centered) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, bias);
  const at::Tensor in = x.contiguous();
  const Weights weights(x, weight, bias);
  Fp8Rows args;
  args.of = Fp8RowsOf::kNorm;
  args.norm = forward_args(kind, in, weights, zero_centered, {});
  args.norm.eps = eps;
  return quantize_rows_of(in, args, in.size(-1));
}

at::Tensor norm_apply(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& rstd,
                      bool zero_centered) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, bias);
  const at::Tensor in = x.contiguous();
  const Weights weights(x, weight, bias);
  at::Tensor y = at::empty_like(in);
  NormForward args = forward_args(kind, in, weights, zero_centered, y);
  check_shape("norm rstd", rstd, {args.rows});
  args.saved_statistics = true;
  args.rstd = rstd.data_ptr();
  if (args.layer_norm) {
    check_shape("norm mean", mean, {args.rows});
    args.mean = mean.data_ptr();
  }
  run_forward(in, args);
  return y;
}

at::Tensor norm_backward(Normalization kind, const at::Tensor& dy, const at::Tensor& x,
                         const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd,
                         bool zero_centered, at::Tensor dweight, at::Tensor dbias,
                         const at::Tensor& residual_grad) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, dbias);
  const at::Tensor in = x.contiguous();
  const at::Tensor grad = as_contiguous(dy, x.scalar_type());
  const Weights weights(x, weight, {});
  at::Tensor dx = at::empty_like(in);
  NormBackward args;
  args.layer_norm = kind == Normalization::kLayerNorm;
  args.dtype = to_dtype(in.scalar_type());
  args.columns = in.size(-1);
  args.rows = in.numel() / args.columns;
  args.dy = grad.const_data_ptr();
  args.x = in.const_data_ptr();
  args.zero_centered = zero_centered;
  args.weights_as_x = weights.as_x;
  args.gain = weights.gain.const_data_ptr();
  args.mean = args.layer_norm ? mean.const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  at::Tensor residual;
  if (residual_grad.defined()) {
    MEGATRON_ASSERT(residual_grad.sizes() == in.sizes(),
                    "a residual gradient of another shape than the norm's input");
    residual = as_contiguous(residual_grad, x.scalar_type());
    args.residual_grad = residual.const_data_ptr();
  }
  args.dx = dx.data_ptr();
  const int64_t blocks = (args.rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock;
  at::Tensor dgain_parts =
      at::empty({blocks, args.columns}, in.options().dtype(accumulate_type(x)));
  at::Tensor dbias_parts = dbias.defined() ? at::empty_like(dgain_parts) : at::Tensor();
  args.dgain = dgain_parts.data_ptr();
  args.dbias = dbias.defined() ? dbias_parts.data_ptr() : nullptr;
  launch(
      in, blocks, args.columns * kNormRowsPerBlock,
      [&](int64_t begin, int64_t end) { norm_backward_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(norm_backward_cuda(args, stream)); });
  add_partial_sums(dgain_parts, 1.0, dweight);
  if (dbias.defined()) add_partial_sums(dbias_parts, 1.0, dbias);
  return dx;
}

}  // namespace megatron
