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
  // Requests of other groups share neither a row nor a batch: what a model reads besides their ids
  // differs.
  int64_t group = 0;
};

struct Score {
  double logprob = 0.0;  // natural logarithm, summed over the scored ids
  bool greedy = true;    // each scored id is the most likely one (the smallest of equals)
};

struct ScoringOptions {
  // Tokens per forward, including padding; a single row may have more.
  int64_t batch_tokens = 8192;
  // Of a model that reads more than tokens: rows are padded to a multiple of `row_multiple`, and
  // `add_columns` gives a batch the columns of its rows, each without its padding.
  int64_t row_multiple = 1;
  std::function<void(std::span<const std::span<const int32_t>> rows, int64_t group, Batch& batch)>
      add_columns = nullptr;
  std::vector<int64_t> other_ids;  // that rows may have outside of the vocabulary
};

// Called with the number of requests completed since the last call.
using ScoringProgress = std::function<void(uint64_t requests)>;

// Returns scores in the order of the requests. Rows run longest first, padded on the right;
// requests with equal inputs share one row, and the output layer computes only scored positions. A
// score does not depend on the other rows of its batch (except for rounding).
//
// Communication: batches are dealt to the ranks of groups.dp; one all-reduce over it in the end,
// and those of the model and the loss over groups.tp. Every rank gives equal requests and gets all
// scores. Throws Error for ids outside the vocabulary and rows beyond the model's positions.
std::vector<Score> score(Model& model, const ParallelGroups& groups,
                         std::span<const ScoreRequest> requests, const ScoringOptions& options = {},
                         const ScoringProgress& progress = {});

}  // namespace megatron
