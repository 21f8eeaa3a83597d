// Log-likelihoods of given tokens: the engine of `megatron evaluate`.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/models/model.h"

namespace megatron {

// The last `num_scored` ids, each given all ids before it; at least one id is given.
struct ScoreRequest {
  std::span<const int32_t> ids;  // memory of the caller
  int64_t num_scored = 0;
};

struct Score {
  double logprob = 0.0;  // natural, summed over the scored ids
  bool greedy = true;    // each scored id is the most likely one (the smallest of equals)
};

struct ScoringOptions {
  // Tokens of one forward pass, padding included; a single row may have more.
  int64_t batch_tokens = 8192;
};

// Called with the number of requests that are done since the last call.
using ScoringProgress = std::function<void(uint64_t requests)>;

// Scores in the order of the requests. Rows run longest first, padded on the right; requests with
// equal inputs share one row, and only scored positions reach the output layer. A score does not
// depend on the rows beside it (but for rounding).
//
// Communication: batches are dealt to the ranks of groups.dp; one all-reduce over it in the end,
// and those of the model and the loss over groups.tp. Every rank gives equal requests and gets all
// scores. Throws Error for ids outside the vocabulary and rows beyond the model's positions.
std::vector<Score> score(Model& model, const ParallelGroups& groups,
                         std::span<const ScoreRequest> requests, const ScoringOptions& options = {},
                         const ScoringProgress& progress = {});

}  // namespace megatron
