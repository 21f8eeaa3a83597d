// The output projection, whose weight is its own or the embedding's table.
#pragma once

#include <memory>

#include "megatron/models/common/embedding.h"

namespace megatron {

// Parameter: weight [v, h], split over tp, or over all stages with pipeline_vocab_parallel.
class OutputLayer : public Module {
 public:
  // Throws Error when the vocabulary does not divide over the ranks.
  OutputLayer(const ModelConfig& config, const ParallelGroups& groups);
  Parameter& weight() { return weight_; }

 private:
  Parameter weight_;
};

// The projection of hidden states to logits on segments that have it: the last one, and with
// pipeline_vocab_parallel all. Says which segments share the table of a tied one.
class OutputProjection {
 public:
  // `embedding`: of this segment; null: it has none. `table` as for make_model(). Both outlive it.
  // Throws Error for a tied one that is split over the stages.
  OutputProjection(const ModelConfig& config, const ParallelGroups& groups, const StageSlice& slice,
                   LanguageModelEmbedding* embedding, Parameter* table);

  // The module that holds the weight, for the model to add as output_layer or, a copy of the table,
  // as embedding. Null: there is none.
  Module* output_layer() { return output_layer_.get(); }
  TiedTable* tied_table() { return tied_table_.get(); }
  ColumnParallelLinear& linear();

 private:
  std::unique_ptr<OutputLayer> output_layer_;
  std::unique_ptr<TiedTable> tied_table_;
  std::unique_ptr<ColumnParallelLinear> linear_;
};

}  // namespace megatron
