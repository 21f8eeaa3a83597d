#include "megatron/transformer/ssm/normed_gate.h"

#include "megatron/tensor/shape.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/placed.h"
#include "megatron/transformer/ssm/uniform_math.h"

namespace megatron {

NormedGateResult normed_gate(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                             double eps) {
  const at::NoGradGuard no_grad;
  if (const auto normed = ssm_kernels::normed_gate({y, z, w}, eps))
    return {normed->o, normed->rstd};
  const at::Tensor rstd = at::rsqrt(y.to(accumulate_type(y)).square().mean(-1) + eps);
  return {normed_gate_apply(y, z, w, rstd), rstd};
}

at::Tensor normed_gate_apply(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                             const at::Tensor& rstd) {
  const at::NoGradGuard no_grad;
  if (const auto o = ssm_kernels::normed_gate_apply({y, z, w}, rstd)) return *o;
  const at::ScalarType type = accumulate_type(y);
  return (y.to(type) * rstd.unsqueeze(-1) * w.to(type) * uniform_silu(z.to(type)))
      .to(y.scalar_type());
}

NormedGateGrads normed_gate_backward(const at::Tensor& grad, const at::Tensor& y,
                                     const at::Tensor& z, const at::Tensor& w,
                                     const at::Tensor& rstd, const at::Tensor& dz) {
  const at::NoGradGuard no_grad;
  if (const auto grads = ssm_kernels::normed_gate_backward(grad, {y, z, w}, rstd, dz))
    return {grads->y, placed(grads->z, dz), grads->w};
  const at::ScalarType type = accumulate_type(y);
  const at::Tensor scale = rstd.unsqueeze(-1), n = y.to(type) * scale, wide_z = z.to(type),
                   sigmoid = at::sigmoid(wide_z), gate = wide_z * sigmoid, d = grad.to(type);
  const at::Tensor dn = d * w.to(type) * gate;
  NormedGateGrads grads;
  grads.y = (scale * (dn - n * (dn * n).mean(-1, /*keepdim=*/true))).to(y.scalar_type());
  grads.z = placed(
      (d * w.to(type) * n * sigmoid * (1.0 + wide_z * (1.0 - sigmoid))).to(z.scalar_type()), dz);
  grads.w = (d * n * gate).sum(at::IntArrayRef({0, 1, 2}));
  return grads;
}

}  // namespace megatron
