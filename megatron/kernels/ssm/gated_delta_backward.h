// The backward of the gated delta rule (gated_delta.h). Needs a Hopper GPU; deterministic.
#pragma once

#include "megatron/kernels/ssm/gated_delta.h"

namespace megatron {

struct GatedDeltaBackwardArgs {
  GatedDeltaArgs rule;  // without o, final_state and workspace
  ScanRows dout;
  const float* dfinal_state = nullptr;  // null: 0
  // Gradients are assigned. Those of q and k are sums over the heads of values that share them.
  ScanRows dq, dk, dv;
  float *dg = nullptr, *dbeta = nullptr;  // as g, beta
  float* dinitial_state = nullptr;        // or null
  void* workspace = nullptr;  // gated_delta_backward_workspace() bytes, 128-byte aligned
};

// Keys and values of the same size, 64 or 128.
constexpr bool gated_delta_backward_supports(int64_t key_size, int64_t value_size) {
  return gated_delta_supports(key_size, value_size) && key_size == value_size;
}
// Of all chunks, bf16: W and U; then, in tiles of [64, 64], the states before and the gradients of
// the states after, what is written (E) and its gradient, and the inverses behind W and U.
constexpr int64_t gated_delta_backward_workspace(const GatedDeltaArgs& rule) {
  const int64_t tiles =
      2 * (rule.value_size / 64) * (rule.key_size / 64 + 1) + 1;  // of a chunk of a head
  return (gated_delta_workspace(rule) + 127) / 128 * 128 +
         rule.samples * ((rule.tokens + 63) / 64) * rule.value_heads * tiles * 64 * 64 * 2;
}
void gated_delta_backward_cuda(const GatedDeltaBackwardArgs& args, void* stream);

}  // namespace megatron
