#include "megatron/models/gpt/gpt_model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/embedding.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/models/common/vocabulary_pass.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/linear_cross_entropy.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {
struct GPTModel::Impl {
  Impl(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice)
      : decoder(config.transformer, slice.first_layer, slice.num_layers,
                /*final_norm=*/slice.head, config.sequence_parallel, groups) {}

  std::unique_ptr<LanguageModelEmbedding> embedding;
  TransformerBlock decoder;
  std::unique_ptr<OutputProjection> output;
};

GPTModel::GPTModel(const ModelConfig& config, const ParallelGroups& groups)
    : GPTModel(config, groups, {0, config.transformer.num_layers, true, true}) {}

GPTModel::GPTModel(const ModelConfig& given, const ParallelGroups& groups, const StageSlice& slice,
                   Parameter* table)
    : Model(given, groups, slice) {
  const ModelConfig& config = this->config();  // layers keep references to it
  impl_ = std::make_unique<Impl>(config, groups, slice);
  if (slice.embedding) {
    impl_->embedding = std::make_unique<LanguageModelEmbedding>(config, groups);
    add("embedding", impl_->embedding.get());
  }
  add("decoder", &impl_->decoder);
  impl_->output =
      std::make_unique<OutputProjection>(config, groups, slice, impl_->embedding.get(), table);
  if (Module* output = impl_->output->output_layer()) add("output_layer", output);
  if (Module* copy = impl_->output->tied_table()) add("embedding", copy);
  name_parameters();
  if (config.transformer.lora_rank == 0) return;
  visit([](const std::string& name, Parameter& parameter) {
    parameter.trainable = is_lora_parameter(name);
  });
}

GPTModel::~GPTModel() = default;

Parameter* GPTModel::embedding_table() {
  return impl_->embedding ? &impl_->embedding->weight() : nullptr;
}

std::vector<std::string> GPTModel::auxiliary_losses() const {
  return megatron::auxiliary_losses(config().transformer);
}

StageTensors GPTModel::hidden(const Batch& batch, const StageTensors& input,
                              const ForwardContext& given) {
  const ForwardContext context = with_rows(given, config().sequence_parallel, groups().tp);
  at::Tensor x;
  if (impl_->embedding) {
    const at::Tensor& tokens = batch["tokens"];
    check_shape("tokens", tokens, {-1, -1});
    check_shape("place.position", context.place.position, {tokens.size(1)});
    x = impl_->embedding->forward(tokens, context);
  } else {
    MEGATRON_ASSERT(input.size() == 1, input.size(), " tensors from the previous segment");
    x = input.front();
  }
  check_shape("hidden states", x,
              {context.rows.position.size(0), context.place.sample.size(0),
               config().transformer.hidden_size});
  return {impl_->decoder.forward(std::move(x), context)};
}

at::Tensor GPTModel::logits(const at::Tensor& hidden) {
  const at::Tensor logits = impl_->output->linear().forward(hidden);
  const double cap = config().transformer.final_logit_softcapping;
  return cap > 0.0 ? logits.div(cap).tanh().mul(cap) : logits;
}

at::Tensor GPTModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp);
}

Loss GPTModel::loss(const StageTensors& states, const Batch& batch, const ForwardContext& context) {
  const at::Tensor &hidden = states.front(), &labels = batch["labels"],
                   &loss_mask = batch["loss_mask"], &loss_grad = context.loss_grad;
  check_shape("loss_mask", loss_mask, {labels.size(0), labels.size(1)});
  const ModelConfig& config = this->config();
  const at::Tensor mask =
      loss_mask.t().to(hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  at::Tensor per_token;
  if (config.transformer.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear &&
      loss_grad.defined() && at::GradMode::is_enabled()) {
    const LinearCrossEntropyOptions options = {config.vocab_size, config.transformer.z_loss_coeff,
                                               config.transformer.cross_entropy_chunk_tokens,
                                               config.sequence_parallel};
    per_token =
        linear_cross_entropy(impl_->output->linear().weight(), hidden, labels.t().contiguous(),
                             mask * loss_grad.to(mask.scalar_type()), options, groups().tp);
  } else {
    per_token = token_losses(hidden, labels);
  }
  return {(per_token * mask).sum(), mask.sum()};
}

std::unique_ptr<VocabularyPass> GPTModel::begin_loss(const at::Tensor& hidden, const Batch& batch) {
  MEGATRON_ASSERT(config().pipeline_vocab_parallel,
                  "the vocabulary is not divided over the stages");
  return split_vocabulary_pass(*this, groups().model_parallel, hidden, batch["labels"],
                               batch["loss_mask"]);
}

const ModelType& gpt_model_type() {
  static const ModelType type = {"gpt", "GPT", make_model_of<GPTModel>, language_ends_cost};
  return type;
}

}  // namespace megatron
