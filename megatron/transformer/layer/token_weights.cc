#include "megatron/transformer/layer/token_weights.h"

#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor TokenWeights::padding_rows(int64_t first_row, int64_t rows) const {
  return padding.defined() ? padding.t().narrow(0, first_row, rows) : at::Tensor();
}

at::Tensor weights_of_sequences(const SequenceTotals& totals, bool per_token_loss) {
  const at::Tensor tokens = per_token_loss ? totals.tokens : totals.tokens.sum();
  const at::Tensor weight = per_token_loss ? totals.loss_weight : at::ones_like(totals.loss_weight);
  return at::where(totals.tokens > 0, weight / at::clamp_min(tokens, 1), 0);
}

}  // namespace megatron
