#include "megatron/transformer/ssm/gated_norm.h"

#include "megatron/comm/process_group.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/ssm/ssm_kernels.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/placed.h"
#include "megatron/transformer/ssm/uniform_math.h"

namespace megatron {
namespace {

// [s, b, d] -> [s, b, groups, d / groups]
at::Tensor by_group(const at::Tensor& x, const NormGroups& groups) {
  return x.view({x.size(0), x.size(1), groups.count, -1});
}

// Whether this rank has all channels of its groups.
bool is_whole(const NormGroups& groups) {
  return groups.shared == nullptr || groups.shared->size() == 1;
}

// Mean over the channels of each group, [s, b, groups, 1].
at::Tensor group_mean(const at::Tensor& x, const NormGroups& groups) {
  const at::Tensor sums = by_group(x, groups).sum(-1, /*keepdim=*/true);
  const int64_t channels = x.size(2) / groups.count;
  if (is_whole(groups)) return sums / static_cast<double>(channels);
  const int ranks = groups.shared->size();
  at::Tensor of_ranks = at::empty({ranks, sums.numel()}, sums.options());
  groups.shared->all_gather(of_ranks, sums)->wait();
  at::Tensor total = of_ranks[0];
  for (int rank = 1; rank < ranks; ++rank) total = total + of_ranks[rank];
  return total.view(sums.sizes()) / static_cast<double>(ranks * channels);
}

at::Tensor gated(const at::Tensor& y, const at::Tensor& z) {
  const at::ScalarType type = accumulate_type(y);
  return y.to(type) * uniform_silu(z.to(type));
}

at::Tensor scaled(const at::Tensor& v, const at::Tensor& w, const at::Tensor& rstd) {
  const NormGroups groups{.count = rstd.size(2)};
  return (by_group(v, groups) * rstd.unsqueeze(-1)).view(v.sizes()) * w.to(v.scalar_type());
}

}  // namespace

GatedNormResult gated_norm(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                           const NormGroups& groups) {
  const at::NoGradGuard no_grad;
  if (is_whole(groups)) {
    if (const auto result = ssm_kernels::gated_norm({y, z, w}, groups.count, groups.eps))
      return {result->o, result->rstd};
  }
  const at::Tensor v = gated(y, z);
  const at::Tensor rstd = at::rsqrt(group_mean(v * v, groups) + groups.eps).squeeze(-1);
  if (const auto o = ssm_kernels::gated_norm_apply({y, z, w}, rstd)) return {*o, rstd};
  return {scaled(v, w, rstd).to(y.scalar_type()), rstd};
}

at::Tensor gated_norm_apply(const at::Tensor& y, const at::Tensor& z, const at::Tensor& w,
                            const at::Tensor& rstd) {
  const at::NoGradGuard no_grad;
  if (const auto o = ssm_kernels::gated_norm_apply({y, z, w}, rstd)) return *o;
  return scaled(gated(y, z), w, rstd).to(y.scalar_type());
}

GatedNormGrads gated_norm_backward(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& z,
                                   const at::Tensor& w, const at::Tensor& rstd,
                                   const NormGroups& groups, const at::Tensor& dz) {
  const at::NoGradGuard no_grad;
  if (is_whole(groups)) {
    if (const auto grads =
            ssm_kernels::gated_norm_backward(grad, {y, z, w}, groups.count, groups.eps, dz))
      return {grads->y, placed(grads->z, dz), grads->w};
  }
  const at::ScalarType type = accumulate_type(y);
  const at::Tensor yf = y.to(type), zf = z.to(type), sigma = at::sigmoid(zf), gate = zf * sigma;
  const at::Tensor v = yf * gate, scale = rstd.to(type).unsqueeze(-1);
  const at::Tensor normed = (by_group(v, groups) * scale).view(v.sizes());
  const at::Tensor g = grad.to(type) * w.to(type);
  const at::Tensor along = group_mean(g * normed, groups);
  const at::Tensor dv =
      ((by_group(g, groups) - by_group(normed, groups) * along) * scale).view(v.sizes());
  return {(dv * gate).to(y.scalar_type()),
          placed((dv * yf * sigma * (1.0 + zf * (1.0 - sigma))).to(z.scalar_type()), dz),
          (grad.to(type) * normed).sum(at::IntArrayRef({0, 1}))};
}

}  // namespace megatron
