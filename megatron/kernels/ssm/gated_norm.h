// RMS norm with a gate behind a state-space scan, forward and backward, in bf16. CUDA alone; tensor
// operations compute the same elsewhere. Gate, norm and sums in fp32; deterministic.
//
//   gate first (Mamba-2)     v = y silu(z),  o = w v rstd(v)
//   norm first (delta nets)  o = w y rstd(y) silu(z)
//
// rstd(v) = 1 / sqrt(mean of v^2 + epsilon) over each group of neighbouring columns.
#pragma once

#include "megatron/kernels/ssm/scan_rows.h"

namespace megatron {

struct GatedNormArgs {
  int64_t tokens = 0, samples = 1;
  int64_t groups = 1, group_size = 0;
  bool norm_first = false;
  bool shared_weight = false;  // one weight [group_size] for all groups
  float epsilon = 1e-5f;
  ScanRows y, z, out;            // [groups, group_size]; 16-byte aligned, strides multiples of 8
  const void* weight = nullptr;  // [groups, group_size] bf16, or [group_size]
  float* rstd = nullptr;         // [tokens, samples, groups], assigned by the forward; or null
  // The same, given, such as of groups that are wider than those here; null: computed. With the
  // gate first for the forward alone.
  const float* given_rstd = nullptr;

  // The backward's. Gradients are assigned.
  ScanRows dout, dy, dz;
  float* dweight = nullptr;    // as the weight
  float* workspace = nullptr;  // gated_norm_workspace() floats
};

// Groups of a multiple of 8 columns, up to 8192.
constexpr bool gated_norm_supports(int64_t group_size) {
  return group_size % 8 == 0 && group_size >= 8 && group_size <= 8192;
}
int64_t gated_norm_workspace(const GatedNormArgs& args);
void gated_norm_forward_cuda(const GatedNormArgs& args, void* stream);
void gated_norm_backward_cuda(const GatedNormArgs& args, void* stream);

}  // namespace megatron
