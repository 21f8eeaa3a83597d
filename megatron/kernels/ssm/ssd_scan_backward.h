// The backward of the scan of Mamba-2 (kernels/ssm/ssd_scan.h). Needs a Hopper GPU. Deterministic:
// sums over the heads of a group, tokens and samples have a fixed order.
#pragma once

#include "megatron/kernels/ssm/ssd_scan.h"

namespace megatron {

struct SsdScanBackwardArgs {
  SsdScanArgs scan;                     // as of the forward; y and final_state are not read
  ScanRows dy;                          // as y
  const float* dfinal_state = nullptr;  // [samples, H, P, N], or null: 0

  // Assigned.
  ScanRows dx, db, dc;              // as x, b, c
  float* ddt = nullptr;             // [tokens, samples, H]
  float* da = nullptr;              // [H]
  float* dd = nullptr;              // [H]
  float* dinitial_state = nullptr;  // [samples, H, P, N], or null
  void* workspace = nullptr;        // ssd_scan_workspace() bytes, 16-byte aligned
};

// Head sizes 64 and 128, states of 64 and 128.
constexpr bool ssd_scan_backward_supports(int64_t head_size, int64_t state_size) {
  return (head_size == 64 || head_size == 128) && (state_size == 64 || state_size == 128);
}
// States and their gradients, bf16, before each 128 tokens: 4 P N / 128 bytes a token and head.
int64_t ssd_scan_workspace(const SsdScanBackwardArgs& args);
void ssd_scan_backward_cuda(const SsdScanBackwardArgs& args, void* stream);

}  // namespace megatron
