#include "megatron/transformer/moe/expert_bias.h"

#include "megatron/tensor/torch.h"

namespace megatron {

// mean > n_e exactly where sum > E n_e: integers have no rounding.
void update_expert_bias(at::Tensor bias, const at::Tensor& counts, double rate,
                        const at::Tensor& skipped) {
  const at::Tensor wide = counts.to(at::kLong);
  const at::Tensor direction = at::sign(wide.sum() - wide * wide.numel()) * (1 - skipped);
  bias.add_(direction.to(bias.scalar_type()), rate);
}

}  // namespace megatron
