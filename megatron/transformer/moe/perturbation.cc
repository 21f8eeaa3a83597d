#include "megatron/transformer/moe/perturbation.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor jittered(const at::Tensor& x, double epsilon, RandomKey key,
                    const TokenPositions& place) {
  at::Tensor factors = at::empty(x.sizes(), x.options());
  uniform_(factors, 1.0 - epsilon, 1.0 + epsilon, key, place);
  return x * factors;
}

at::Tensor forced_logits(const at::Tensor& logits, const ForcedRouting& forced, RandomKey key,
                         const TokenPositions& place, int64_t step) {
  const int64_t s = place.position.numel(), b = place.sample.numel(), experts = logits.size(1);
  MEGATRON_ASSERT(logits.size(0) == s * b, logits.size(0), " rows at ", s, " x ", b, " places");
  at::Tensor draws = at::empty({s, b, experts}, logits.options().requires_grad(false));
  normal_(draws, 1.0, key, place);
  if (forced.bias_std != 0.0) {
    at::Tensor bias = at::empty({1, experts}, draws.options());
    const RandomKey of_bias{split_mix(key.value)};
    normal_(bias, std::abs(forced.bias_std), of_bias, forced.bias_std < 0 ? 0 : step, experts, 0);
    draws.add_(bias);
  }
  return draws.view_as(logits) + (logits - logits.detach());
}

}  // namespace megatron
