#include "megatron/models/common/embedding.h"

#include <algorithm>
#include <cmath>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/attention/unpadded_rows.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/layer_state.h"
#include "megatron/transformer/layer/sublayer.h"

namespace megatron {

LanguageModelEmbedding::LanguageModelEmbedding(const ModelConfig& config,
                                               const ParallelGroups& groups,
                                               const EmbeddingTables& tables)
    : config_(config.transformer),
      word_embeddings_(*tables.words, config.sequence_parallel, groups) {
  if (config_.position_embedding_type != PositionEmbedding::kLearnedAbsolute) return;
  MEGATRON_ASSERT(tables.positions != nullptr, "words without their positions");
  position_embeddings_ = std::make_unique<Embedding>(*tables.positions);
}

LanguageModelEmbedding::LanguageModelEmbedding(const ModelConfig& config,
                                               const ParallelGroups& groups,
                                               const EmbeddingExtras& extras)
    : config_(config.transformer),
      first_position_(extras.first_position),
      word_embeddings_(config.vocab_size, config.padded_vocab_size, config_.hidden_size,
                       config_.embedding_init(config.vocab_size), config.sequence_parallel,
                       groups) {
  add("word_embeddings", &word_embeddings_);
  if (extras.norm) {
    norm_ = std::make_unique<Norm>(config_.hidden_size,
                                   norm_options(config_, config.sequence_parallel));
    add("norm", norm_.get());
  }
  if (config_.position_embedding_type != PositionEmbedding::kLearnedAbsolute) return;
  const int64_t positions = first_position_ + config_.max_position_embeddings;
  position_embeddings_ = std::make_unique<Embedding>(positions, config_.hidden_size,
                                                     config_.embedding_init(positions));
  position_embeddings_->set_sequence_parallel(config.sequence_parallel);
  add("position_embeddings", position_embeddings_.get());
}

EmbeddingTables LanguageModelEmbedding::tables() {
  return {&word_embeddings_.weight(),
          position_embeddings_ ? &position_embeddings_->weight() : nullptr};
}

at::Tensor own_rows(const at::Tensor& column, const ForwardContext& context) {
  return column.transpose(0, 1).narrow(0, context.first_row, context.rows.position.size(0));
}

namespace {
at::Tensor with_given_rows(at::Tensor x, const RaggedBatch& batch) {
  if (!batch.given_rows.defined()) return x;
  return x.index_copy(0, batch.given_rows, batch.given_values.to(x.scalar_type()).unsqueeze(1));
}
}  // namespace

at::Tensor LanguageModelEmbedding::forward(const at::Tensor& tokens, const ForwardContext& context,
                                           const at::Tensor& more, int64_t use) {
  at::Tensor x = word_embeddings_.forward(tokens);
  if (config_.scale_embeddings) {
    // The factor is rounded to the model's type, as Gemma was trained.
    const double root = std::sqrt(static_cast<double>(config_.hidden_size));
    x = x * at::scalar_tensor(root, at::dtype(x.scalar_type())).item<double>();
  }
  if (config_.embedding_multiplier != 1.0) x = x * config_.embedding_multiplier;
  if (context.decoding != nullptr) x = with_given_rows(std::move(x), context.decoding->batch);
  if (position_embeddings_) {
    const bool given = context.position_ids.defined();
    at::Tensor ids = given ? own_rows(context.position_ids, context) : context.rows.position;
    if (first_position_ > 0) ids = ids + first_position_;
    const at::Tensor rows = position_embeddings_->forward(ids);
    x = x + (given ? rows : rows.unsqueeze(1));
  }
  if (more.defined()) x = x + more;
  if (norm_) x = norm_->forward(x);
  if (config_.fp32_residual_connection && x.scalar_type() != at::kDouble) x = x.to(at::kFloat);
  return dropout(x, context.training ? config_.hidden_dropout : 0.0,
                 random_key(config_.seed, "embedding_dropout", use), context.rows);
}

std::unique_ptr<LanguageModelEmbedding> make_embedding_of_uses(const ModelConfig& config,
                                                               const ParallelGroups& groups,
                                                               const EmbeddingTables& tables,
                                                               int uses) {
  if (tables.words != nullptr) {
    for (Parameter* table : tables.looked_up()) table->uses += uses;
    return std::make_unique<LanguageModelEmbedding>(config, groups, tables);
  }
  auto own = std::make_unique<LanguageModelEmbedding>(config, groups);
  for (Parameter* table : own->tables().looked_up()) table->uses = uses;
  return own;
}

const ProcessGroup* stages_of_ends(const StageSlice& slice, const ParallelGroups& groups) {
  if (slice.stages.empty()) return groups.embd.size() > 1 ? &groups.embd : nullptr;
  const int first = slice.stage_of_embedding(), last = slice.stage_of_head();
  if (first == last) return nullptr;
  return &groups.stages({std::min(first, last), std::max(first, last)});
}

TiedTable::TiedTable(const ModelConfig& config, const ParallelGroups& groups,
                     const StageSlice& slice)
    : table_(config.vocab_size, config.padded_vocab_size, config.transformer.hidden_size,
             config.transformer.embedding_init(config.vocab_size), config.sequence_parallel,
             groups) {
  table_.weight().shared = stages_of_ends(slice, groups);
  add("word_embeddings", &table_);
}

ForwardContext without_padding(const ForwardContext& context,
                               std::shared_ptr<const UnpaddedRows> rows) {
  ForwardContext out = context;
  if (rows == nullptr) return out;
  MEGATRON_ASSERT(!context.document_ids.defined() && !context.attention_mask.defined(),
                  "a mask or document ids beside rows without padding");
  out.place = rows->place();
  out.unpadded = std::move(rows);
  return out;
}

ForwardContext with_rows(const ForwardContext& context, bool sequence_parallel,
                         const ProcessGroup& tp) {
  ForwardContext out = context;
  out.rows = context.place;
  if (!sequence_parallel || tp.size() == 1) return out;
  const int64_t s = context.place.position.size(0);
  MEGATRON_CHECK(s % tp.size() == 0, "a sequence of ", s, " tokens is not divisible by ", tp.size(),
                 " tensor-parallel ranks, which --sequence-parallel splits it over");
  const int64_t own = s / tp.size();
  out.first_row = tp.rank() * own;
  out.rows.position = context.place.position.narrow(0, out.first_row, own);
  if (context.unpadded != nullptr)
    out.rows.sample = context.place.sample.narrow(0, out.first_row, own);
  return out;
}

}  // namespace megatron
