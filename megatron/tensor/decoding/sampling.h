// Drawing tokens from rows of logits, and probabilities of tokens, over a vocabulary whose columns
// may be divided over ranks. The order in which a row's logits become a draw: ids that are not
// allowed and biases (edits), penalties, the mask, temperature, top-k, top-p, min-p, then the
// largest logit / temperature + Gumbel noise. The noise is a function of key, position and id, so
// that a draw depends on no other row.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "megatron/kernels/sampling.h"

namespace megatron {

// What ranks with parts of a vocabulary tell each other; default: one rank. Ranks have consecutive
// columns, in their order.
struct VocabularyShards {
  int rank = 0, size = 1;
  std::function<void(const at::Tensor&)> sum, max;      // in place, over all ranks
  std::function<at::Tensor(const at::Tensor&)> gather;  // [size, ...]
};

// How the rows of a batch are drawn. Rows name the entries of the other members that are theirs.
struct SamplingBatch {
  std::vector<SamplingRow> rows;
  std::vector<int32_t> edit_ids;
  std::vector<float> edit_values;  // added to the logit; -infinity: not allowed
  at::Tensor counts;               // [.., columns] int32, see SamplingLogits
  std::vector<uint32_t> masks;     // [.., (vocabulary + 31) / 32]
};

// Natural logarithms of probabilities, fp32. Equal logits of a row give equal bits.
struct LogProbabilities {
  at::Tensor chosen;   // [rows]
  at::Tensor top;      // [rows, n], falling; -infinity behind the last that is kept
  at::Tensor top_ids;  // [rows, n] int64, of equal logits the lower id first; -1 behind the last
};

// Rows of logits on their way to tokens. On CUDA nothing waits for the device.
//
// Communication: over the shards, as many calls of each kind on every rank, which depend on the
// rows' options alone.
class VocabularyLogits {
 public:
  // logits [rows, columns of this rank with padding], any floating type. Columns of padding do not
  // count. At most 2^20 - 1 ids.
  VocabularyLogits(const at::Tensor& logits, int64_t vocab_size, VocabularyShards shards = {});

  // The same of some rows, index [n] int64.
  VocabularyLogits at_rows(const at::Tensor& index) const;

  // Of the logits as the model gave them. `ids` [rows] int64; n at most columns. The same for any
  // number of shards; but in batch-invariant mode with the bits of the loss that training computes
  // over as many shards.
  LogProbabilities log_probabilities(const at::Tensor& ids, int64_t n) const;

  // Ids [rows] int64; -1: no id is allowed. Rows that are not finite give any id. Adds them to
  // batch.counts. Call once.
  at::Tensor draw(const SamplingBatch& batch);
  // After draw(): what is known of its `ids`.
  struct Told {
    at::Tensor ids;  // [rows] int64; 0 where none is allowed, or logits are not finite
    // [3 rows] fp64: these ids; then of each row what was drawn, and 1 if no logit is NaN or
    // infinity and not all are -infinity, which excludes an id, else 0
    at::Tensor numbers;
  };
  Told told(const at::Tensor& ids) const;
  // After draw(): of the distributions that were drawn from; at temperature 0 those at temperature
  // 1 of the ids that are allowed.
  LogProbabilities drawn_log_probabilities(const at::Tensor& ids, int64_t n) const;

 private:
  // What the kernels take; `logits` [rows, columns].
  SamplingLogits arguments(const at::Tensor& logits, const at::Tensor& largest) const;
  SamplingLogits drawn_arguments() const;
  // Runs process_logits() and exchanges its maxima.
  at::Tensor extremes_of(const SamplingLogits& args) const;
  void process(const SamplingBatch& batch);
  void select(SelectBy by);
  at::Tensor draw_kept() const;
  LogProbabilities log_probabilities(const SamplingLogits& of, const at::Tensor& logits,
                                     const at::Tensor& temperature, const at::Tensor& ids,
                                     int64_t n) const;
  LogProbabilities trained_log_probabilities(const at::Tensor& ids, int64_t n) const;
  LogProbabilities largest_of(const SamplingLogits& of, const at::Tensor& logits, int64_t n) const;
  at::Tensor logits_of(const at::Tensor& ids, const at::Tensor& logits) const;

  VocabularyShards shards_;
  int64_t columns_, first_id_;
  at::Tensor given_;         // [rows, columns with padding]
  at::Tensor logits_;        // the same in fp32 (fp64)
  at::Tensor processed_;     // the same tensor if processing changes nothing
  at::Tensor extremes_;      // [3, rows] of all ranks, see process_logits()
  at::Tensor rows_;          // SamplingRow [rows] as bytes
  at::Tensor temperatures_;  // [rows, 1] fp64
  at::Tensor kept_;          // SamplingKept [rows] as bytes; undefined: everything is kept
};

}  // namespace megatron
