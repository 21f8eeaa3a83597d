// Scores of texts by a model with retrieval.
#pragma once

#include "megatron/inference/evaluation/scoring.h"
#include "megatron/inference/retrieval/retro_generator.h"

namespace megatron {

// How texts are scored with what `find` finds for their chunks, which are cut from the beginning.
// `config`, of a model of type retro, outlives the result.
ScoringOptions scoring_with_neighbors(const ModelConfig& config, const Tokenizer& tokenizer,
                                      FindNeighbors find);

}  // namespace megatron
