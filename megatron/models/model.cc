#include "megatron/models/model.h"

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {

Model::Model(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice)
    : config_(config), groups_(groups), slice_(slice) {
  MEGATRON_CHECK(config.vocab_size > 0 && config.padded_vocab_size >= config.vocab_size,
                 "vocabulary of ", config.vocab_size, " tokens in ", config.padded_vocab_size,
                 " rows: expected at least one token and no fewer rows");
}

at::Tensor Model::forward(const at::Tensor& tokens, const ForwardContext& context) {
  return logits(hidden(tokens, {}, context));
}

Loss Model::loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
                 const ForwardContext& context) {
  check_shape("labels", labels, {tokens.size(0), tokens.size(1)});
  return loss(hidden(tokens, {}, context), labels, loss_mask, context.loss_grad);
}

bool Model::outputs_hidden_states() const {
  return !slice_.head || config_.pipeline_vocab_parallel;
}

}  // namespace megatron
