#include "megatron/transformer/ssm/uniform_math.h"

#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor uniform_sigmoid(const at::Tensor& x) {
  return x.is_cpu() ? at::reciprocal(at::exp(-x) + 1.0) : at::sigmoid(x);
}

at::Tensor uniform_silu(const at::Tensor& x) {
  return x.is_cpu() ? x / (at::exp(-x) + 1.0) : at::silu(x);
}

at::Tensor uniform_softplus(const at::Tensor& x) {
  return x.is_cpu() ? at::where(x > 20.0, x, at::log1p(at::exp(x))) : at::softplus(x, 1, 20);
}

}  // namespace megatron
