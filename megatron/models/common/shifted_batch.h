// The columns of a micro-batch as multi-token prediction reads them: token i becomes a later one of
// its sequence.
#pragma once

#include "megatron/models/batch.h"

namespace megatron {

// Column [b, s] of whole sequences with element i + by in the place of element i. 0 where there is
// none, or where it is of another document; document_ids [b, s], undefined: no boundaries.
at::Tensor rolled_left(const at::Tensor& column, int64_t by, const at::Tensor& document_ids);

struct ShiftedColumns {
  at::Tensor tokens, labels;  // [b, s] int64
  at::Tensor position_ids;    // [b, s] int64
  at::Tensor loss_mask;       // [b, s] fp32
  at::Tensor padding;         // bool [b, s]; undefined: there is none
  // [b] fp64: weight of the sequence in the main loss over its weight with this mask; 0 where that
  // is 0
  at::Tensor weight_ratio;
};

// Columns of this rank with context parallelism, shifted along whole sequences.
class ShiftedBatch {
 public:
  // Reads tokens, labels, loss_mask and, if there are some, position_ids; `cp` must outlive it.
  //
  // Communication: over cp, these columns are gathered.
  ShiftedBatch(const Batch& batch, const ProcessGroup& cp);
  ShiftedColumns at(int64_t by) const;

 private:
  const ProcessGroup& cp_;
  at::Tensor integers_;   // [b, n, s] int64: tokens, labels, position ids and, if there is, padding
  at::Tensor loss_mask_;  // [b, s]
  at::Tensor document_ids_;
  at::Tensor weight_;  // [b] fp64
};

}  // namespace megatron
