// The scan of Mamba-2 (state-space duality: Dao & Gu 2024, arXiv:2405.21060), forward. Needs a
// Hopper GPU; transformer/ssm/ssd_scan.h computes the same by tensor operations.
//
//   S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T      [P, N] per head, zero before a document
//   y_t = S_t C_t + D x_t
//
// x, B, C, y are bf16; time steps, decays, states and all sums fp32. In chunks of 64 tokens: what
// the tensor cores multiply is rounded to bf16 (the state before a chunk, the weighted scores C
// B^T, and the weighted x), the state that is carried is not. Deterministic; the host waits for
// nothing.
#pragma once

#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct SsdScanArgs {
  int64_t tokens = 0, samples = 1;
  int64_t heads = 1, groups = 1;             // H, G: H / G neighbouring heads share a group's B, C
  int64_t head_size = 64, state_size = 128;  // P, N
  ScanRows x, y;                             // [H, P]; 16-byte aligned, strides multiples of 8
  ScanRows b, c;                             // [G, N]; likewise
  const float* dt = nullptr;                 // [tokens, samples, H] time steps
  const float* a = nullptr;                  // [H], negative
  const float* d = nullptr;                  // [H], or null: 0
  ScanDocuments documents;
  const float* initial_state = nullptr;       // [samples, H, P, N]; null: 0
  const int64_t* initial_document = nullptr;  // [samples] its document; null: that of token 0
  float* final_state = nullptr;               // [samples, H, P, N], or null
};

// Whether the current device has the kernel: compute capability 9.0.
bool has_ssd_scan();
// Head sizes 64 and 128, states of 64, 128 and 256.
constexpr bool ssd_scan_supports(int64_t head_size, int64_t state_size) {
  return (head_size == 64 || head_size == 128) &&
         (state_size == 64 || state_size == 128 || state_size == 256);
}
void ssd_scan_forward_cuda(const SsdScanArgs& args, void* stream);

}  // namespace megatron
