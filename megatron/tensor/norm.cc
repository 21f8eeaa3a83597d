#include "megatron/tensor/norm.h"

#include "megatron/base/check.h"
#include "megatron/kernels/column_sum.h"
#include "megatron/kernels/norm.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/detail/partial_sum.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// The gain in the accumulating type, with the 1 of a zero-centered weight.
at::Tensor gain_of(const at::Tensor& x, const at::Tensor& weight, bool zero_centered) {
  const at::Tensor gain = as_contiguous(weight, accumulate_type(x));
  return zero_centered ? gain + 1 : gain;
}

// Fills in everything but mean and rstd; the tensors must outlive the result.
NormForward forward_args(Normalization kind, const at::Tensor& x, const at::Tensor& gain,
                         const at::Tensor& bias, const at::Tensor& y) {
  NormForward args;
  args.layer_norm = kind == Normalization::kLayerNorm;
  args.dtype = to_dtype(x.scalar_type());
  args.columns = x.size(-1);
  args.rows = x.numel() / args.columns;
  args.x = x.const_data_ptr();
  args.gain = gain.const_data_ptr();
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.y = y.data_ptr();
  return args;
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
  const at::Tensor gain = gain_of(x, weight, zero_centered);
  const at::Tensor shift = bias.defined() ? as_contiguous(bias, gain.scalar_type()) : bias;
  NormResult result;
  result.y = at::empty_like(in);
  NormForward args = forward_args(kind, in, gain, shift, result.y);
  args.eps = eps;
  if (amax.defined()) args.amax = amax.data_ptr<float>();
  result.rstd = at::empty({args.rows}, gain.options());
  args.rstd = result.rstd.data_ptr();
  if (args.layer_norm) {
    result.mean = at::empty({args.rows}, gain.options());
    args.mean = result.mean.data_ptr();
  }
  run_forward(in, args);
  return result;
}

at::Tensor norm_apply(Normalization kind, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& rstd,
                      bool zero_centered) {
  const at::NoGradGuard no_grad;
  check_vectors(x, weight, bias);
  const at::Tensor in = x.contiguous();
  const at::Tensor gain = gain_of(x, weight, zero_centered);
  const at::Tensor shift = bias.defined() ? as_contiguous(bias, gain.scalar_type()) : bias;
  at::Tensor y = at::empty_like(in);
  NormForward args = forward_args(kind, in, gain, shift, y);
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
  const at::Tensor gain = gain_of(x, weight, zero_centered);
  at::Tensor dx = at::empty_like(in);
  NormBackward args;
  args.layer_norm = kind == Normalization::kLayerNorm;
  args.dtype = to_dtype(in.scalar_type());
  args.columns = in.size(-1);
  args.rows = in.numel() / args.columns;
  args.dy = grad.const_data_ptr();
  args.x = in.const_data_ptr();
  args.gain = gain.const_data_ptr();
  args.mean = args.layer_norm ? mean.const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  at::Tensor residual;
  if (residual_grad.defined()) {
    MEGATRON_ASSERT(residual_grad.sizes() == in.sizes(),
                    "a gradient beside a norm of another shape");
    residual = as_contiguous(residual_grad, x.scalar_type());
    args.residual_grad = residual.const_data_ptr();
  }
  args.dx = dx.data_ptr();
  const int64_t blocks = (args.rows + kNormRowsPerBlock - 1) / kNormRowsPerBlock;
  at::Tensor dgain_parts = at::empty({blocks, args.columns}, gain.options());
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
