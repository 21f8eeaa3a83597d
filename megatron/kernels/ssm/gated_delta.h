// The gated delta rule (Yang et al. 2024, arXiv:2412.06464), forward. Needs a Hopper GPU;
// transformer/ssm/gated_delta.h computes the same by tensor operations.
//
//   R = exp(g_t) S_{t-1},  e = beta_t (v_t - R^T k_t)       [K, V] per head of values, zero before
//   S_t = R + k_t e^T,     o_t = S_t^T q_t / sqrt(K)        a document
//
// q, k, v, o are bf16; g, beta, states and all sums fp32. In chunks of 64 tokens, by the WY
// representation e = U - W S (Yang et al. 2024, arXiv:2406.06484): what the tensor cores multiply
// is rounded to bf16 (the inverse that makes W and U, these, e, the state before a chunk, and the
// weighted scores Q K^T), the inverse itself and the state that is carried are not. Deterministic;
// the host waits for nothing.
#pragma once

#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct GatedDeltaArgs {
  int64_t tokens = 0, samples = 1;
  int64_t key_heads = 1, value_heads = 1;    // value_heads / key_heads neighbours share a key head
  int64_t key_size = 128, value_size = 128;  // K, V
  ScanRows q, k;                // [key_heads, K]; 16-byte aligned, strides multiples of 8
  ScanRows v, o;                // [value_heads, V]; likewise
  const float* g = nullptr;     // [tokens, samples, value_heads] logarithms of decays, at most 0
  const float* beta = nullptr;  // [tokens, samples, value_heads]
  ScanDocuments documents;
  const float* initial_state = nullptr;       // [samples, value_heads, K, V]; null: 0
  const int64_t* initial_document = nullptr;  // [samples] its document; null: that of token 0
  float* final_state = nullptr;               // [samples, value_heads, K, V], or null
  void* workspace = nullptr;                  // gated_delta_workspace() bytes, 16-byte aligned
};

// Sizes of 64 and 128.
constexpr bool gated_delta_supports(int64_t key_size, int64_t value_size) {
  return (key_size == 64 || key_size == 128) && (value_size == 64 || value_size == 128);
}
// W and U of all tokens.
constexpr int64_t gated_delta_workspace(const GatedDeltaArgs& args) {
  return 2 * args.tokens * args.samples * args.value_heads * (args.key_size + args.value_size);
}
void gated_delta_forward_cuda(const GatedDeltaArgs& args, void* stream);

}  // namespace megatron
