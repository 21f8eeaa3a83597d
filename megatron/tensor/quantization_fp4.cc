// NVFP4 composed of ATen operations: exact rounding on any device, at the price of many passes over
// memory.
//
// Follows Transformer Engine's NVFP4 recipe; NVIDIA 2025 (arXiv:2509.25149), "Pretraining Large
// Language Models with NVFP4", for which operands are transformed and which are rounded
// stochastically.
#include "megatron/base/check.h"
#include "megatron/tensor/quantization.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr double kLargestE2M1 = 6.0, kLargestE4M3 = 448.0;
constexpr int64_t kBlock = 16;

// The distance between E2M1 values around |x| <= 6.
at::Tensor step_of(const at::Tensor& magnitude) {
  const at::Tensor half = at::full({}, 0.5, magnitude.options());
  return at::where(magnitude.lt(2), half, at::where(magnitude.lt(4), half * 2, half * 4));
}

// Uniform in [0, 1), a hash of position and value.
at::Tensor hashed_uniform(const at::Tensor& x) {
  const at::Tensor place = at::arange(x.numel(), x.options().dtype(at::kLong)).view(x.sizes());
  at::Tensor h = x.contiguous().view(at::kInt).to(at::kLong).bitwise_xor(place.mul(0x9E3779B1));
  for (const int64_t factor : {int64_t{0x7FEB352D}, int64_t{0x46A3B9CD}}) {
    h = h.bitwise_and(0xffffffff);
    h = h.bitwise_xor(h.bitwise_right_shift(at::scalar_tensor(15, h.options()))).mul(factor);
  }
  h = h.bitwise_and(0xffffffff);
  h = h.bitwise_xor(h.bitwise_right_shift(at::scalar_tensor(16, h.options())));
  return h.bitwise_and(0xffffff).to(at::kFloat).mul(1.0 / 16777216.0);
}

// Rounds values within [-6, 6] to E2M1.
at::Tensor round_e2m1(const at::Tensor& x, bool at_random) {
  const at::Tensor magnitude = x.abs(), step = step_of(magnitude);
  const at::Tensor units = magnitude / step;
  const at::Tensor rounded = at_random ? at::floor(units + hashed_uniform(x)) : at::round(units);
  return at::copysign(rounded * step, x);
}

QuantizedMatrix quantize_matrix(const at::Tensor& x, bool square, bool at_random) {
  const int64_t r = x.size(0), c = x.size(1), height = square ? kBlock : 1;
  const at::Tensor blocks = x.contiguous().view({r / height, height, c / kBlock, kBlock});
  const at::Tensor amax = x.abs().max();
  const at::Tensor one = at::ones({}, x.options());
  const at::Tensor encode =
      at::where(amax.gt(0), (one * (kLargestE4M3 * kLargestE2M1)) / amax, one);
  const at::Tensor decode = at::reciprocal(encode);
  const at::Tensor of_block = blocks.abs().amax(at::IntArrayRef{1, 3}, /*keepdim=*/true);
  const at::Tensor block = (of_block / kLargestE2M1 * encode)
                               .clamp_max(kLargestE4M3)
                               .to(at::kFloat8_e4m3fn)
                               .to(at::kFloat);
  const at::Tensor factor =
      at::reciprocal(block * decode).clamp_max(std::numeric_limits<float>::max());
  const at::Tensor codes =
      round_e2m1((blocks * factor).clamp(-kLargestE2M1, kLargestE2M1), at_random);
  // The inverse scale goes to kFp8InverseAt.
  return {(codes * block).view({r, c}).to(at::kBFloat16),
          at::stack({encode, decode, decode, decode, decode}), ScaleLayout::kTensor};
}

// Multiplies groups of 16 along the last dimension by an orthonormal matrix of +-1/4 with
// Transformer Engine's signs.
at::Tensor transform(const at::Tensor& x) {
  at::Tensor h = at::ones({1, 1}, x.options());
  for (int i = 0; i < 4; ++i) h = at::cat({at::cat({h, h}, 1), at::cat({h, -h}, 1)}, 0);
  const std::vector<double> signs = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};
  const at::Tensor matrix =
      at::tensor(signs, at::dtype(at::kFloat)).to(x.device()).unsqueeze(1) * h * 0.25;
  return at::matmul(x.contiguous().view({-1, kBlock}), matrix).view(x.sizes());
}

}  // namespace

QuantizedTensor quantize_nvfp4(const at::Tensor& x, OperandRole role, Orientations wanted) {
  const at::NoGradGuard no_grad;
  const at::Tensor in = x.reshape({-1, x.size(-1)}).to(at::kFloat);
  MEGATRON_ASSERT(in.size(0) % kBlock == 0 && in.size(1) % kBlock == 0, "FP4 blocks of [",
                  in.size(0), ", ", in.size(1), "]");
  const bool weight = role == OperandRole::kWeight, at_random = role == OperandRole::kGradient;
  QuantizedTensor out;
  if (wanted.rows || weight) out.rows = quantize_matrix(in, weight, at_random);
  if (!wanted.columns) return out;
  if (weight) {
    out.columns = {out.rows.codes.t().contiguous(), out.rows.scale, ScaleLayout::kTensor};
  } else {
    out.columns = quantize_matrix(transform(in.t()), /*square=*/false, at_random);
  }
  return out;
}

}  // namespace megatron
