// Embedding of tokens and positions, and the copy of its table that a tied output layer needs on
// another pipeline stage.
#pragma once

#include <memory>
#include <vector>

#include "megatron/models/model.h"
#include "megatron/nn/norm.h"
#include "megatron/tensor_parallel/layers.h"
#include "megatron/tensor_parallel/vocab_parallel_embedding.h"

namespace megatron {

struct EmbeddingExtras {
  int64_t first_position = 0;  // row of the table of learned positions that position 0 has
  bool norm = false;           // of the sum of all embeddings, before dropout
};

// Parameters: word_embeddings.weight, position_embeddings.weight (learned positions only), norm.*
// (where EmbeddingExtras says so).
//
// Communication: over tp, as VocabParallelEmbedding.
class LanguageModelEmbedding : public Module {
 public:
  LanguageModelEmbedding(const ModelConfig& config, const ParallelGroups& groups,
                         const EmbeddingExtras& extras = {});
  // Looks up in the tables of another segment on this rank, which must outlive it.
  LanguageModelEmbedding(const ModelConfig& config, const ParallelGroups& groups,
                         const EmbeddingTables& tables);
  // [b, s] -> [s, b, h] ([s/t, b, h] with sequence parallelism), with embedding dropout. `more`, of
  // the result's shape, is added before it; undefined: nothing. `use` numbers the uses in a pass,
  // which have dropout draws of their own. Given rows of a ragged batch stand in
  // the place of embeddings of words, scaled ones if they are scaled.
  at::Tensor forward(const at::Tensor& tokens, const ForwardContext& context,
                     const at::Tensor& more = {}, int64_t use = 0);
  Parameter& weight() { return word_embeddings_.weight(); }
  EmbeddingTables tables();

 private:
  const TransformerConfig& config_;
  int64_t first_position_ = 0;
  VocabParallelEmbedding word_embeddings_;
  std::unique_ptr<Embedding> position_embeddings_;
  std::unique_ptr<Norm> norm_;
};

// The embedding of a segment that looks up in it `uses` times in a pass, and counts them: in the
// tables of another segment on this rank where there are any, else in its own.
std::unique_ptr<LanguageModelEmbedding> make_embedding_of_uses(const ModelConfig& config,
                                                               const ParallelGroups& groups,
                                                               const EmbeddingTables& tables,
                                                               int uses);

// The stages with the embedding and the head, one of which this is, for what both have; null: they
// are one.
//
// Communication: the first call makes their group.
const ProcessGroup* stages_of_ends(const StageSlice& slice, const ParallelGroups& groups);

// A copy of the embedding table for a tied output layer on another stage; named and initialised as
// the original.
class TiedTable : public Module {
 public:
  TiedTable(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice);
  Parameter& weight() { return table_.weight(); }

 private:
  VocabParallelEmbedding table_;
};

// Columns [b, s, ...] of this rank's rows of the activations between layers: [s, b, ...] ([s/t, b,
// ...]). `context` as with_rows() returns it.
at::Tensor own_rows(const at::Tensor& column, const ForwardContext& context);

// The context of rows without padding, in which tokens attend within their sample. `rows` may be
// null: the context as it is.
ForwardContext without_padding(const ForwardContext& context,
                               std::shared_ptr<const UnpaddedRows> rows);

// The context with the positions of this rank's rows of the activations between layers. Throws
// Error when the sequence does not divide over the ranks.
ForwardContext with_rows(const ForwardContext& context, bool sequence_parallel,
                         const ProcessGroup& tp);

}  // namespace megatron
