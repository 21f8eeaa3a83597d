// The output projection's weight, where it is not the embedding's table.
#pragma once

#include "megatron/models/model.h"

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

}  // namespace megatron
