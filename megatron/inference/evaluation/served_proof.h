// Shows that a model answers as it was trained: tokens and log-probabilities of an engine, over
// chunks of prompts, cached prefixes and all ranks of the model, against forwards of the training
// kind over each text alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megatron/inference/local_links.h"
#include "megatron/models/model.h"
#include "megatron/scheduling/request.h"

namespace megatron {

// A request and what it got.
struct ServedText {
  RequestSpec spec;
  std::vector<int32_t> tokens;
  std::vector<PositionLogProbabilities> prompt;  // from spec.log_probabilities.prompt_from on
  std::vector<PositionLogProbabilities> output;  // as many as tokens, if they were wanted
  Finish finish;
};

// Requests that an engine is likely to get wrong: random prompts that share beginnings, in two
// waves, so that the second finds those of the first in the cache; greedy and drawn. Texts have at
// most `positions` tokens, at least 12.
struct ServedWorkload {
  std::vector<std::vector<RequestSpec>> waves;
  int64_t positions = 0;
};
// `input_tokens`: most that the encoder of an encoder-decoder reads, of which each request has its
// own; 0: the model has none.
ServedWorkload served_workload(int64_t vocab_size, int64_t positions, uint32_t seed,
                               int64_t input_tokens = 0);

// The workload through an engine with few blocks, so that texts wait for each other, and few tokens
// a step, so that prompts come in chunks. Called by every rank of the model, each with its part of
// it and its rank in `links`; the texts are those of rank 0. Throws Error when a rank fails.
//
// Communication: that of ModelRunner.
std::vector<ServedText> serve_workload(Model& model, const ServedWorkload& workload,
                                       LocalLinks& links, int rank);

// Differences between served texts and `model`, which is whole.
struct ServedComparison {
  struct Line {
    int64_t compared = 0, failed = 0;
    double difference = 0.0, allowed = 0.0;  // of the worst one
    std::string worst;
  };
  Line log_probabilities;
  Line greedy_tokens;  // differences of the largest logit and that of the token
  int64_t cached_tokens = 0;
};
// `band`: allowed for a log-probability, relative to it or to 1 if that is more.
ServedComparison compare_served(Model& model, std::span<const ServedText> texts, double band);

// Log-probabilities are told in fp32.
inline constexpr double kServedBand = 2.5e-7;

}  // namespace megatron
