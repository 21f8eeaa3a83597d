#include "megatron/models/gpt/gpt_model.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/linear_cross_entropy.h"
#include "megatron/tensor_parallel/mappings.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {
namespace {

// word_embeddings.weight, position_embeddings.weight (learned positions only).
class GPTEmbedding : public Module {
 public:
  GPTEmbedding(const GPTConfig& config, const ParallelGroups& groups)
      : config_(config.transformer),
        dropout_key_(random_key(config_.seed, "embedding_dropout")),
        word_embeddings_(config.vocab_size, config.padded_vocab_size, config_.hidden_size,
                         config_.embedding_init(config.vocab_size), config.sequence_parallel,
                         groups) {
    add("word_embeddings", &word_embeddings_);
    if (config_.position_embedding_type != PositionEmbedding::kLearnedAbsolute) return;
    position_embeddings_ =
        std::make_unique<Embedding>(config_.max_position_embeddings, config_.hidden_size,
                                    config_.embedding_init(config_.max_position_embeddings));
    position_embeddings_->set_sequence_parallel(config.sequence_parallel);
    add("position_embeddings", position_embeddings_.get());
  }

  // [b, s] -> [s, b, h] ([s/t, b, h] with sequence parallelism)
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context) {
    at::Tensor x = word_embeddings_.forward(tokens);
    if (config_.scale_embeddings) {
      // The factor is rounded to the model's type, as Gemma was trained.
      const double root = std::sqrt(static_cast<double>(config_.hidden_size));
      x = x * at::scalar_tensor(root, at::dtype(x.scalar_type())).item<double>();
    }
    if (position_embeddings_) {
      const at::Tensor rows =
          context.position_ids.defined()
              ? position_embeddings_->forward(own_rows(context.position_ids.t(), context))
              : position_embeddings_->forward(context.rows.position).unsqueeze(1);
      x = x + rows;
    }
    if (config_.fp32_residual_connection && x.scalar_type() != at::kDouble) x = x.to(at::kFloat);
    return dropout(x, context.training ? config_.hidden_dropout : 0.0, dropout_key_, context.rows);
  }

  Parameter& weight() { return word_embeddings_.weight(); }

 private:
  static at::Tensor own_rows(const at::Tensor& ids, const ForwardContext& context) {
    return ids.narrow(0, context.first_row, context.rows.position.size(0));
  }

  const TransformerConfig& config_;
  RandomKey dropout_key_;
  VocabParallelEmbedding word_embeddings_;
  std::unique_ptr<Embedding> position_embeddings_;
};

// output_layer.weight of an untied output layer.
class OutputLayer : public Module {
 public:
  OutputLayer(const GPTConfig& config, const ParallelGroups& groups) {
    const ProcessGroup& ranks = config.pipeline_vocab_parallel ? groups.model_parallel : groups.tp;
    MEGATRON_CHECK(config.padded_vocab_size % ranks.size() == 0, "a vocabulary of ",
                   config.padded_vocab_size, " rows is not divisible by the ", ranks.size(),
                   " ranks that share it");
    weight_.local_shape = {config.padded_vocab_size / ranks.size(), config.transformer.hidden_size};
    weight_.global_shape = {config.padded_vocab_size, config.transformer.hidden_size};
    weight_.valid_rows = config.vocab_size;
    weight_.placement.shards = {
        {0, config.pipeline_vocab_parallel ? Axis::kModel : Axis::kTensor, {}}};
    weight_.init =
        config.transformer.weight_init(config.vocab_size, config.transformer.hidden_size);
    weight_.role = ParameterRole::kOutput;
    add("weight", &weight_);
  }
  Parameter& weight() { return weight_; }

 private:
  Parameter weight_;
};

class GPTVocabularyPass final : public VocabularyPass {
 public:
  GPTVocabularyPass(GPTModel& model, const ProcessGroup& ranks, const at::Tensor& hidden,
                    const at::Tensor& labels, const at::Tensor& loss_mask) {
    at::Tensor start = hidden.detach();
    if (at::GradMode::is_enabled()) hidden_ = BackwardEnd(start);
    const at::Tensor logits = model.logits(start);
    const GPTConfig& config = model.config();
    entropy_ =
        std::make_unique<SplitCrossEntropy>(logits, labels.t().contiguous(), config.vocab_size,
                                            config.transformer.z_loss_coeff, ranks.rank());
    mask_ = loss_mask.t().to(entropy_->statistics().scalar_type());
    if (at::GradMode::is_enabled()) logits_ = BackwardRoot(logits);
  }

  at::Tensor statistics() const override { return entropy_->statistics(); }
  Loss loss(const at::Tensor& all) override {
    const at::Tensor per_token = entropy_->loss(all);
    return {(per_token * mask_).sum(), mask_.sum()};
  }
  at::Tensor backward(const at::Tensor& factor) override {
    logits_.run(entropy_->backward(mask_ * factor));
    return hidden_.take_grad();
  }

 private:
  BackwardEnd hidden_;
  BackwardRoot logits_;
  std::unique_ptr<SplitCrossEntropy> entropy_;
  at::Tensor mask_;  // [s, b]
};

// A copy of the embedding table for a tied output layer on another stage; named and initialised as
// the original.
class TiedTable : public Module {
 public:
  TiedTable(const GPTConfig& config, const ParallelGroups& groups)
      : table_(config.vocab_size, config.padded_vocab_size, config.transformer.hidden_size,
               config.transformer.embedding_init(config.vocab_size), config.sequence_parallel,
               groups) {
    table_.weight().shared = &groups.embd;
    add("word_embeddings", &table_);
  }
  Parameter& weight() { return table_.weight(); }

 private:
  VocabParallelEmbedding table_;
};

// The context with the positions of this rank's rows of the activations between layers.
ForwardContext with_rows(const ForwardContext& context, bool sequence_parallel,
                         const ProcessGroup& tp) {
  ForwardContext out = context;
  out.rows = context.place;
  if (!sequence_parallel || tp.size() == 1) return out;
  const int64_t s = context.place.position.size(0);
  MEGATRON_CHECK(s % tp.size() == 0, "a sequence of ", s, " tokens is not divisible by ", tp.size(),
                 " tensor-parallel ranks, which --sequence-parallel splits it over");
  out.rows.position = context.place.position.narrow(0, tp.rank() * (s / tp.size()), s / tp.size());
  out.first_row = tp.rank() * (s / tp.size());
  return out;
}

}  // namespace

struct GPTModel::Impl {
  Impl(const GPTConfig& c, const ParallelGroups& g, const StageSlice& part)
      : config(c),
        groups(g),
        slice(part),
        decoder(config.transformer, part.first_layer, part.num_layers, /*final_norm=*/part.head,
                c.sequence_parallel, g) {}

  const GPTConfig config;
  const ParallelGroups& groups;
  const StageSlice slice;
  std::unique_ptr<GPTEmbedding> embedding;
  TransformerBlock decoder;
  std::unique_ptr<OutputLayer> output_layer;
  std::unique_ptr<TiedTable> tied_table;
  // The output projection; its weight is that of one of these
  std::unique_ptr<ColumnParallelLinear> head;
};

GPTModel::GPTModel(const GPTConfig& config, const ParallelGroups& groups)
    : GPTModel(config, groups, {0, config.transformer.num_layers, true, true}) {}

GPTModel::GPTModel(const GPTConfig& config, const ParallelGroups& groups, const StageSlice& slice,
                   Parameter* table) {
  MEGATRON_CHECK(config.vocab_size > 0 && config.padded_vocab_size >= config.vocab_size,
                 "vocabulary of ", config.vocab_size, " tokens in ", config.padded_vocab_size,
                 " rows: expected at least one token and no fewer rows");
  impl_ = std::make_unique<Impl>(config, groups, slice);
  const bool tied = !config.transformer.untie_embeddings_and_output_weights;
  Parameter* head = nullptr;
  if (slice.embedding) {
    impl_->embedding = std::make_unique<GPTEmbedding>(impl_->config, groups);
    add("embedding", impl_->embedding.get());
    if (tied && !slice.head && groups.embd.size() > 1)
      impl_->embedding->weight().shared = &groups.embd;
  }
  add("decoder", &impl_->decoder);
  MEGATRON_CHECK(
      !config.pipeline_vocab_parallel || !tied,
      "a tied output layer cannot be divided over the stages: its table lies with the embedding");
  if ((slice.head || config.pipeline_vocab_parallel) && !tied) {
    impl_->output_layer = std::make_unique<OutputLayer>(impl_->config, groups);
    add("output_layer", impl_->output_layer.get());
    head = &impl_->output_layer->weight();
  } else if (slice.head) {
    if (slice.embedding) table = &impl_->embedding->weight();
    if (table == nullptr) {
      impl_->tied_table = std::make_unique<TiedTable>(impl_->config, groups);
      add("embedding", impl_->tied_table.get());
      table = &impl_->tied_table->weight();
    } else {
      table->uses = 2;
      table->shared = nullptr;
    }
    head = table;
  }
  if (head != nullptr)
    impl_->head = std::make_unique<ColumnParallelLinear>(*head, config.sequence_parallel, groups);
  name_parameters();
  if (config.transformer.lora_rank == 0) return;
  visit([](const std::string& name, Parameter& parameter) {
    parameter.trainable = is_lora_parameter(name);
  });
}

GPTModel::~GPTModel() = default;

const GPTConfig& GPTModel::config() const { return impl_->config; }
const StageSlice& GPTModel::slice() const { return impl_->slice; }
const ParallelGroups& GPTModel::groups() const { return impl_->groups; }
Parameter* GPTModel::embedding_table() {
  return impl_->embedding ? &impl_->embedding->weight() : nullptr;
}

at::Tensor GPTModel::hidden(const at::Tensor& tokens, const at::Tensor& input,
                            const ForwardContext& given) {
  const ForwardContext context =
      with_rows(given, impl_->config.sequence_parallel, impl_->groups.tp);
  at::Tensor x = input;
  if (impl_->embedding) {
    check_shape("tokens", tokens, {-1, -1});
    check_shape("place.position", context.place.position, {tokens.size(1)});
    x = impl_->embedding->forward(tokens, context);
  }
  check_shape("hidden states", x,
              {context.rows.position.size(0), context.place.sample.size(0),
               impl_->config.transformer.hidden_size});
  return impl_->decoder.forward(std::move(x), context);
}

at::Tensor GPTModel::logits(const at::Tensor& hidden) {
  MEGATRON_ASSERT(impl_->head != nullptr, "this segment holds no output layer");
  const at::Tensor logits = impl_->head->forward(hidden);
  const double cap = impl_->config.transformer.final_logit_softcapping;
  return cap > 0.0 ? logits.div(cap).tanh().mul(cap) : logits;
}

at::Tensor GPTModel::token_losses(const at::Tensor& hidden, const at::Tensor& labels) {
  return vocab_parallel_cross_entropy(logits(hidden), labels.t().contiguous(),
                                      impl_->config.vocab_size,
                                      impl_->config.transformer.z_loss_coeff, impl_->groups.tp);
}

Loss GPTModel::loss(const at::Tensor& hidden, const at::Tensor& labels, const at::Tensor& loss_mask,
                    const at::Tensor& loss_grad) {
  check_shape("loss_mask", loss_mask, {labels.size(0), labels.size(1)});
  const GPTConfig& config = impl_->config;
  const at::Tensor mask =
      loss_mask.t().to(hidden.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  at::Tensor per_token;
  if (config.transformer.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear &&
      loss_grad.defined() && at::GradMode::is_enabled()) {
    MEGATRON_ASSERT(impl_->head != nullptr, "this segment holds no output layer");
    const LinearCrossEntropyOptions options = {config.vocab_size, config.transformer.z_loss_coeff,
                                               config.transformer.cross_entropy_chunk_tokens,
                                               config.sequence_parallel};
    per_token =
        linear_cross_entropy(impl_->head->weight(), hidden, labels.t().contiguous(),
                             mask * loss_grad.to(mask.scalar_type()), options, impl_->groups.tp);
  } else {
    per_token = token_losses(hidden, labels);
  }
  return {(per_token * mask).sum(), mask.sum()};
}

bool GPTModel::outputs_hidden_states() const {
  return !impl_->slice.head || impl_->config.pipeline_vocab_parallel;
}

std::unique_ptr<VocabularyPass> GPTModel::begin_loss(const at::Tensor& hidden,
                                                     const at::Tensor& labels,
                                                     const at::Tensor& loss_mask) {
  MEGATRON_ASSERT(impl_->config.pipeline_vocab_parallel,
                  "the vocabulary is not divided over the stages");
  check_shape("loss_mask", loss_mask, {labels.size(0), labels.size(1)});
  return std::make_unique<GPTVocabularyPass>(*this, impl_->groups.model_parallel, hidden, labels,
                                             loss_mask);
}

at::Tensor GPTModel::forward(const at::Tensor& tokens, const ForwardContext& context) {
  return logits(hidden(tokens, {}, context));
}

Loss GPTModel::loss(const at::Tensor& tokens, const at::Tensor& labels, const at::Tensor& loss_mask,
                    const ForwardContext& context) {
  check_shape("labels", labels, {tokens.size(0), tokens.size(1)});
  return loss(hidden(tokens, {}, context), labels, loss_mask, context.loss_grad);
}

ParameterShapes parameter_shapes(const GPTConfig& config) {
  const ParallelGroups groups;
  GPTModel model(config, groups);  // declares parameters, holds no memory
  ParameterShapes shapes;
  model.visit([&](const std::string& name, Parameter& parameter) {
    shapes.emplace_back(name, logical_shape(parameter));
  });
  return shapes;
}

}  // namespace megatron
