// Batch-invariant mode for a while: for what one call computes, in a process whose other models
// choose for themselves.
#pragma once

#include "megatron/tensor/batch_invariant/mode.h"

namespace megatron {

// Puts back what was before. The mode is the process's: not for threads that compute side by side.
class BatchInvariantScope {
 public:
  explicit BatchInvariantScope(bool on) : before_(is_batch_invariant()) { set_batch_invariant(on); }
  ~BatchInvariantScope() { set_batch_invariant(before_); }
  BatchInvariantScope(const BatchInvariantScope&) = delete;
  BatchInvariantScope& operator=(const BatchInvariantScope&) = delete;

 private:
  const bool before_;
};

}  // namespace megatron
