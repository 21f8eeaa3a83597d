// What single tokens weigh in losses that sum over all tokens, prompts too: those of routers.
//
// The main loss weighs tokens by its mask and is divided by the sum of the mask. A sequence q with
// the sum w_q of its mask and T_q tokens gives each of its tokens the weight w_q / T_q, so that the
// weights of all tokens sum to that of the main loss. With --no-calculate-per-token-loss a token
// weighs 1 / (tokens of the micro-batch) and the step divides by the number of micro-batches.
// Padding counts nowhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace megatron {

// Sums over whole sequences of a micro-batch, known on every rank and stage before a pass.
struct SequenceTotals {
  at::Tensor loss_weight;  // [b] fp64: w_q
  at::Tensor tokens;       // [b] fp64: T_q
};

struct TokenWeights {
  // [b] fp64: weight of each token of a sequence that is no padding; undefined: not known, since no
  // such loss is wanted
  at::Tensor of_sequence;
  at::Tensor padding;  // bool [b, s], True = padding; undefined: there is none

  // Of the activations between layers, [rows, b] of this rank; undefined: there is none.
  at::Tensor padding_rows(int64_t first_row, int64_t rows) const;
};

// The weights [b]; 0 for a sequence without tokens.
at::Tensor weights_of_sequences(const SequenceTotals& totals, bool per_token_loss);

}  // namespace megatron
