#include "megatron/models/gpt/gpt_model.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {
namespace {

// word_embeddings.weight, position_embeddings.weight (learned positions only).
class GPTEmbedding : public Module {
 public:
  GPTEmbedding(const GPTConfig& config, bool sequence_parallel, const ParallelGroups& groups)
      : config_(config.transformer),
        dropout_key_(random_key(config_.seed, "embedding_dropout")),
        word_embeddings_(config.vocab_size, config.padded_vocab_size, config_.hidden_size,
                         config_.embedding_init(config.vocab_size), sequence_parallel, groups) {
    add("word_embeddings", &word_embeddings_);
    if (config_.position_embedding_type != PositionEmbedding::kLearnedAbsolute) return;
    position_embeddings_ =
        std::make_unique<Embedding>(config_.max_position_embeddings, config_.hidden_size,
                                    config_.embedding_init(config_.max_position_embeddings));
    add("position_embeddings", position_embeddings_.get());
  }

  // [b, s] -> [s, b, h]
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context) {
    at::Tensor x = word_embeddings_.forward(tokens);
    if (position_embeddings_) {
      const at::Tensor rows =
          context.position_ids.defined()
              ? position_embeddings_->forward(context.position_ids.t())
              : position_embeddings_->forward(context.place.position).unsqueeze(1);
      x = x + rows;
    }
    if (config_.fp32_residual_connection && x.scalar_type() != at::kDouble) x = x.to(at::kFloat);
    return dropout(x, context.training ? config_.hidden_dropout : 0.0, dropout_key_, context.place);
  }

  Parameter& weight() { return word_embeddings_.weight(); }

 private:
  const TransformerConfig& config_;
  RandomKey dropout_key_;
  VocabParallelEmbedding word_embeddings_;
  std::unique_ptr<Embedding> position_embeddings_;
};

// output_layer.weight of an untied head.
class OutputLayer : public Module {
 public:
  explicit OutputLayer(const GPTConfig& config, const ParallelGroups& groups) {
    weight_.local_shape = {config.padded_vocab_size / groups.tp.size(),
                           config.transformer.hidden_size};
    weight_.global_shape = {config.padded_vocab_size, config.transformer.hidden_size};
    weight_.valid_rows = config.vocab_size;
    weight_.placement.shards = {{0, Axis::kTensor, {}}};
    weight_.init =
        config.transformer.weight_init(config.vocab_size, config.transformer.hidden_size);
    weight_.role = ParameterRole::kOutput;
    add("weight", &weight_);
  }
  Parameter& weight() { return weight_; }

 private:
  Parameter weight_;
};

}  // namespace

struct GPTModel::Impl {
  Impl(const GPTConfig& c, const ParallelGroups& g)
      : config(c),
        groups(g),
        embedding(config, /*sequence_parallel=*/false, g),
        decoder(config.transformer, 0, config.transformer.num_layers, /*final_norm=*/true,
                /*sequence_parallel=*/false, g) {}
  Parameter& output_weight() { return output_layer ? output_layer->weight() : embedding.weight(); }

  const GPTConfig config;
  const ParallelGroups& groups;
  GPTEmbedding embedding;
  TransformerBlock decoder;
  std::unique_ptr<OutputLayer> output_layer;
};

GPTModel::GPTModel(const GPTConfig& config, const ParallelGroups& groups) {
  MEGATRON_CHECK(config.vocab_size > 0 && config.padded_vocab_size >= config.vocab_size,
                 "vocabulary of ", config.vocab_size, " tokens in ", config.padded_vocab_size,
                 " rows: expected at least one token and no fewer rows");
  impl_ = std::make_unique<Impl>(config, groups);
  add("embedding", &impl_->embedding);
  add("decoder", &impl_->decoder);
  if (config.transformer.untie_embeddings_and_output_weights) {
    impl_->output_layer = std::make_unique<OutputLayer>(impl_->config, groups);
    add("output_layer", impl_->output_layer.get());
  } else {
    impl_->embedding.weight().uses = 2;
  }
  name_parameters();
}

GPTModel::~GPTModel() = default;

const GPTConfig& GPTModel::config() const { return impl_->config; }

at::Tensor GPTModel::forward(const at::Tensor& tokens, const ForwardContext& context) {
  check_shape("tokens", tokens, {-1, -1});
  check_shape("place.position", context.place.position, {tokens.size(1)});
  at::Tensor x = impl_->embedding.forward(tokens, context);
  x = impl_->decoder.forward(x, context);
  Parameter& weight = impl_->output_weight();
  x = x.to(weight.value.scalar_type());
  return ColumnParallelLinear::forward_with(weight, x, /*sequence_parallel=*/false,
                                            impl_->groups.tp);
}

Loss GPTModel::loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
                    const ForwardContext& context) {
  check_shape("labels", labels, {tokens.size(0), tokens.size(1)});
  check_shape("loss_mask", loss_mask, {tokens.size(0), tokens.size(1)});
  const at::Tensor logits = forward(tokens, context);
  const at::Tensor per_token =
      vocab_parallel_cross_entropy(logits, labels.t().contiguous(), impl_->config.vocab_size,
                                   impl_->config.transformer.z_loss_coeff, impl_->groups.tp);
  const at::Tensor mask = loss_mask.t().to(per_token.scalar_type());
  return {(per_token * mask).sum(), mask.sum()};
}

}  // namespace megatron
