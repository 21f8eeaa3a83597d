#include "megatron/models/gpt/gpt_model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/embedding.h"
#include "megatron/models/common/freezing.h"
#include "megatron/models/common/multi_token_prediction.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/models/common/vocabulary_pass.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/linear_cross_entropy.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {
struct GPTModel::Impl {
  Impl(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice)
      : decoder(config.transformer, slice.first_layer, slice.num_layers,
                /*final_norm=*/slice.head, config.sequence_parallel, groups) {}

  // Of the first segment; with multi-token prediction also of the last one.
  std::unique_ptr<LanguageModelEmbedding> embedding;
  TransformerBlock decoder;
  std::unique_ptr<MultiTokenPrediction> mtp;  // on the last segment
  std::unique_ptr<OutputProjection> output;
};

namespace {

// Stages that share a tied output layer's table, or with multi-token prediction the embedding.
void share_tables(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
                  LanguageModelEmbedding& embedding) {
  const TransformerConfig& t = config.transformer;
  const bool tied = !t.untie_embeddings_and_output_weights;
  if ((slice.embedding && slice.head) || (t.mtp_num_layers == 0 && !tied)) return;
  const ProcessGroup* const ends = stages_of_ends(slice, groups);
  if (t.mtp_num_layers > 0) {
    for (Parameter* table : embedding.tables().looked_up()) table->shared = ends;
  } else {
    embedding.weight().shared = ends;
  }
}

}  // namespace

GPTModel::GPTModel(const ModelConfig& config, const ParallelGroups& groups)
    : GPTModel(config, groups, {0, config.transformer.num_layers, true, true}) {}

GPTModel::GPTModel(const ModelConfig& given, const ParallelGroups& groups, const StageSlice& slice,
                   const EmbeddingTables& tables)
    : Model(given, groups, slice) {
  MEGATRON_CHECK(given.transformer.position_embedding_type != PositionEmbedding::kRelative,
                 "--position-embedding-type relative is not built for GPT\nhint: rope");
  Parameter* const table = tables.words;
  const ModelConfig& config = this->config();  // layers keep references to it
  impl_ = std::make_unique<Impl>(config, groups, slice);
  const bool mtp = slice.head && config.transformer.mtp_num_layers > 0;
  make_embedding(mtp, table);
  add("decoder", &impl_->decoder);
  impl_->output =
      std::make_unique<OutputProjection>(config, groups, slice, impl_->embedding.get(), table);
  if (mtp) make_mtp();
  if (Module* output = impl_->output->output_layer()) add("output_layer", output);
  if (Module* copy = impl_->output->tied_table()) add("embedding", copy);
  name_parameters();
  freeze_beside_adapters(*this);
}

GPTModel::~GPTModel() = default;

void GPTModel::make_embedding(bool mtp, Parameter* table) {
  if (table != nullptr && slice().head) table->shared = nullptr;  // both ends are on this rank
  if (!slice().embedding && !mtp) return;
  if (!slice().embedding && table != nullptr) {
    impl_->embedding =
        std::make_unique<LanguageModelEmbedding>(config(), groups(), EmbeddingTables{table});
    return;
  }
  impl_->embedding = std::make_unique<LanguageModelEmbedding>(config(), groups());
  share_tables(config(), groups(), slice(), *impl_->embedding);
  if (!slice().embedding)
    for (Parameter* copy : impl_->embedding->tables().looked_up()) copy->uses = 0;
  add("embedding", impl_->embedding.get());
}

// The depths use the tables of the embedding and the output layer once each.
void GPTModel::make_mtp() {
  MultiTokenEnds ends;
  ends.embed = [this](const at::Tensor& tokens, const ForwardContext& context, int64_t depth) {
    return impl_->embedding->forward(tokens, context, {}, depth);
  };
  ends.token_losses = [this](const at::Tensor& hidden, const at::Tensor& labels,
                             const at::Tensor& weights, const ForwardContext& context,
                             at::Tensor* hits) {
    return trained_losses(hidden, labels, weights, context, hits);
  };
  impl_->mtp = std::make_unique<MultiTokenPrediction>(config(), groups(), std::move(ends));
  add("mtp", impl_->mtp.get());
  const int depths = static_cast<int>(config().transformer.mtp_num_layers);
  for (Parameter* table : impl_->embedding->tables().looked_up()) table->uses += depths;
  impl_->output->linear().weight().uses += depths;
}

EmbeddingTables GPTModel::embedding_tables() {
  return impl_->embedding ? impl_->embedding->tables() : EmbeddingTables{};
}

std::vector<std::string> GPTModel::auxiliary_losses() const {
  std::vector<std::string> names = megatron::auxiliary_losses(config().transformer);
  for (std::string& name : MultiTokenPrediction::loss_names(config().transformer))
    names.push_back(std::move(name));
  return names;
}

StageTensors GPTModel::hidden(const Batch& batch, const StageTensors& input,
                              const ForwardContext& context) {
  return hidden_with(batch, {}, input, context);
}

StageTensors GPTModel::hidden_with(const Batch& batch, at::Tensor more, const StageTensors& input,
                                   const ForwardContext& given) {
  const ForwardContext context = with_rows(given, config().sequence_parallel, groups().tp);
  at::Tensor x;
  if (slice().embedding) {
    const at::Tensor& tokens = batch["tokens"];
    check_shape("tokens", tokens, {-1, -1});
    check_shape("place.position", context.place.position, {tokens.size(1)});
    x = embed(tokens, std::move(more), context);
  } else {
    MEGATRON_ASSERT(input.size() == 1, input.size(), " tensors from the previous segment");
    x = input.front();
  }
  check_shape("hidden states", x,
              {context.rows.position.size(0), context.place.sample.size(0),
               config().transformer.hidden_size});
  x = impl_->decoder.forward(std::move(x), context);
  if (impl_->mtp && context.auxiliary_losses != nullptr) x = impl_->mtp->forward(x, batch, context);
  return {std::move(x)};
}

at::Tensor GPTModel::embed(const at::Tensor& tokens, at::Tensor more,
                           const ForwardContext& context) {
  if (more.defined()) more = more.narrow(0, context.first_row, context.rows.position.size(0));
  return impl_->embedding->forward(tokens, context, more);
}

at::Tensor GPTModel::scaled(const at::Tensor& hidden) const {
  const double divisor = config().transformer.logits_scaling;
  return divisor == 1.0 ? hidden : hidden * (1.0 / divisor);
}

at::Tensor GPTModel::logits(const at::Tensor& hidden) {
  const at::Tensor logits = impl_->output->linear().forward(scaled(hidden));
  const double cap = config().transformer.final_logit_softcapping;
  return cap > 0.0 ? logits.div(cap).tanh().mul(cap) : logits;
}

at::Tensor GPTModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return token_losses(hidden, labels, /*hits=*/nullptr);
}

at::Tensor GPTModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels,
                                  at::Tensor* hits) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(), config().vocab_size,
                                      config().transformer.z_loss_coeff, groups().tp, hits);
}

at::Tensor GPTModel::trained_losses(const at::Tensor& hidden, const at::Tensor& labels,
                                    const at::Tensor& weights, const ForwardContext& context,
                                    at::Tensor* hits) {
  const TransformerConfig& config = this->config().transformer;
  if (config.cross_entropy_fusion_impl != CrossEntropyFusion::kLinear ||
      !context.loss_grad.defined() || !at::GradMode::is_enabled())
    return token_losses(hidden, labels, hits);
  const LinearCrossEntropyOptions options = {this->config().vocab_size, config.z_loss_coeff,
                                             config.cross_entropy_chunk_tokens,
                                             this->config().sequence_parallel};
  return linear_cross_entropy(
      impl_->output->linear().weight(), scaled(hidden), labels.t().contiguous(),
      weights * context.loss_grad.to(weights.scalar_type()), options, groups().tp, hits);
}

Loss GPTModel::loss(const StageTensors& states, const Batch& batch, const ForwardContext& context) {
  const at::Tensor &hidden = states.front(), &labels = batch["labels"],
                   &loss_mask = batch["loss_mask"];
  check_shape("loss_mask", loss_mask, {labels.size(0), labels.size(1)});
  const at::Tensor mask =
      loss_mask.t().to(hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor per_token = trained_losses(hidden, labels, mask, context, /*hits=*/nullptr);
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
