// Log-likelihoods of given tokens, for `megatron evaluate`.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "megatron/models/model.h"

namespace megatron {

// Scores the last `num_scored` ids, each conditioned on all ids before it; at least one id is
// context.
struct ScoreRequest {
  std::span<const int32_t> ids;  // owned by the caller
  int64_t num_scored = 0;
};

struct Score {
  double logprob = 0.0;  // natural logarithm, summed over the scored ids
  bool greedy = true;    // each scored id is the most likely one (the smallest of equals)
};

struct ScoringOptions {
  // Tokens per forward, including padding; a single row may have more.
  int64_t batch_tokens = 8192;
};

// Called with the number of requests completed since the last call.
using ScoringProgress = std::function<void(uint64_t requests)>;

// Returns scores in the order of the requests. Rows run longest first, padded on the right;
// requests with equal inputs share one row, and the output layer computes only scored positions. A
// score does not depend on the other rows of its batch (except for rounding).
//
// Communication: batches are distributed over groups.dp, with one all-reduce over it at the end;
// the model and the loss communicate over groups.tp. Every rank passes the same requests and gets
// all scores. Throws Error for ids outside the vocabulary and rows longer than the model's
// positions.
std::vector<Score> score(GPTModel& model, const ParallelGroups& groups,
                         std::span<const ScoreRequest> requests, const ScoringOptions& options = {},
                         const ScoringProgress& progress = {});

}  // namespace megatron
