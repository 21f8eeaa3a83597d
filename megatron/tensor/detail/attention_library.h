// Shared by the callers of library attention kernels: which calls a kernel supports exactly,
// layouts, determinism.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "megatron/tensor/attention/attention.h"

namespace megatron {

using AttentionGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv

// Checks shapes, types and options of core_attention. Throws InternalError.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options);

// Why no library kernel supports exactly this, or "". cuDNN supports windows, flash attention does
// not.
std::string why_unfused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const AttentionOptions& options, bool knows_windows = false);

// Whether the library's top-left causal mask, or no mask, is equivalent to the options. A single
// query sees every key.
bool library_mask_fits(const at::Tensor& q, const at::Tensor& k, const AttentionOptions& options);

// [s, b, n, d] with zeros up to this width: flash attention takes values as wide as keys.
at::Tensor padded(const at::Tensor& t, int64_t width);

// [s, b, n, d] <-> [b, n, s, d], a view.
at::Tensor to_heads(const at::Tensor& t);
at::Tensor from_heads(const at::Tensor& t);
// [s, b, n, d] -> [b * groups, n / groups, s, d], a view: each group becomes a sample, so that
// cuDNN's deterministic backward can process some at a time.
at::Tensor fold_groups(const at::Tensor& t, int64_t groups);

// Note [Deterministic attention]
// The backward of flash attention sums dq in a fixed order only in ATen's deterministic mode, a
// process-wide setting. It is switched on only for that call: elsewhere it would forbid unrelated
// operations and fill new memory. cuDNN's backward is called through its frontend, which has its
// own switch; ATen's wrapper has none.
class DeterministicScope {
 public:
  DeterministicScope();
  ~DeterministicScope();
  DeterministicScope(const DeterministicScope&) = delete;
  DeterministicScope& operator=(const DeterministicScope&) = delete;

 private:
  bool algorithms_, warn_only_, fill_;
};

}  // namespace megatron
